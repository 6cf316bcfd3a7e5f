"""What tools note beside the files of a lease: it outlives the node, and nobody hands it in."""

import json
from collections.abc import Callable

from etude.envserver.host.environment import LeasedEnvironment
from etude.envserver.host.host import Host
from etude.v1 import environments_pb2

MakeNode = Callable[..., Host]
Order = Callable[..., environments_pb2.OpenEnvironmentsRequest]


async def opened(node: Host, order: Order) -> LeasedEnvironment:
    request = order("a")
    request.toolset = "Standard"
    await node.open(request)
    return node.find("a")


async def todo(environment: LeasedEnvironment, call_id: str, *todos: object) -> str:
    arguments = json.dumps({"merge": True, "todos": todos})
    call = environments_pb2.ToolCall(call_id=call_id, name="todo_write", arguments_json=arguments)
    return (await environment.run_turn([call]))[0].content.decode()


async def test_todos_are_there_for_the_successor_of_a_dead_host(
    make_node: MakeNode, order: Order
) -> None:
    dead = await opened(make_node(), order)
    await todo(dead, "1", {"id": "1", "content": "read"}, {"id": "2", "content": "fix"})

    node = make_node()
    assert await node.take_over() == (1, 0)
    told = await todo(node.find("a"), "2", {"id": "1", "status": "completed"})
    assert told == "2 todos, 1 open:\n[x] 1: read\n[ ] 2: fix"


async def test_a_repeated_call_to_a_successor_says_the_same(
    make_node: MakeNode, order: Order
) -> None:
    dead = await opened(make_node(), order)
    await todo(dead, "1", {"id": "1", "content": "read"})
    change = {"id": "1", "status": "completed"}
    told = await todo(dead, "2", change)

    node = make_node()
    await node.take_over()
    assert await todo(node.find("a"), "2", change) == told


async def test_todos_are_not_handed_in_and_end_with_their_lease(
    make_node: MakeNode, order: Order
) -> None:
    node = make_node()
    environment = await opened(node, order)
    await todo(environment, "1", {"id": "1", "content": "read"})
    assert await environment.diff() == environments_pb2.WorkspaceDiff()
    await node.close(["a"])
    assert list(node.driver.leases.iterdir()) == []
