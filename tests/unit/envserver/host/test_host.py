"""What a node does with the calls of one lease."""

import asyncio
import itertools
import json
from collections.abc import Callable

import pytest

from etude.common.errors import InvalidFieldError, ReusedIdError, UnknownIdError
from etude.envserver.drivers.base import CommandOutcome, SandboxError
from etude.envserver.drivers.folder_driver import FolderCommand
from etude.envserver.drivers.in_memory import MemoryDriver, run_tests
from etude.envserver.host.environment import LeasedEnvironment
from etude.envserver.host.host import Host
from etude.envserver.host.leases import call_results as results_module
from etude.envserver.host.workspace_change import ChangeTooLargeError
from etude.envserver.storage import folders
from etude.v1 import environments_pb2

MakeNode = Callable[..., Host]
Order = Callable[..., environments_pb2.OpenEnvironmentsRequest]

FIX = {"path": "shop/core.py", "old_string": "a - b", "new_string": "a + b"}


def call(call_id: str, name: str, **arguments: str) -> environments_pb2.ToolCall:
    return environments_pb2.ToolCall(
        call_id=call_id, name=name, arguments_json=json.dumps(arguments)
    )


async def opened(node: Host, order: Order, name: str = "a") -> LeasedEnvironment:
    await node.open(order(name))
    return node.find(name)


async def said(environment: LeasedEnvironment, *calls: environments_pb2.ToolCall) -> list[str]:
    return [result.content.decode() for result in await environment.run_turn(calls)]


def commands(node: Host) -> list[str]:
    assert isinstance(node.driver, MemoryDriver)
    return node.driver.commands


async def test_a_rollout_reads_repairs_and_tests(make_node: MakeNode, order: Order) -> None:
    environment = await opened(make_node(), order)

    assert await said(environment, call("1", "run_terminal", command="pytest -q")) == [
        "FAILED test_add\n1 failed"
    ]
    assert await said(environment, call("2", "list_dir", path=".")) == ["shop/core.py"]
    both = call("3", "search_replace", **FIX), call("4", "run_terminal", command="pytest -q")
    assert await said(environment, *both) == ["ok", "1 passed"]


async def test_a_diff_is_what_the_calls_changed(make_node: MakeNode, order: Order) -> None:
    environment = await opened(make_node(), order)
    assert await environment.diff() == environments_pb2.WorkspaceDiff()

    await said(environment, call("1", "search_replace", **FIX))

    (written,) = (await environment.diff()).written
    assert (written.path, written.content) == (
        "shop/core.py",
        b"def add(a, b):\n    return a + b\n",
    )


async def test_leases_from_one_source_do_not_share_files(make_node: MakeNode, order: Order) -> None:
    node = make_node()
    one, other = await opened(node, order, "a"), await opened(node, order, "b")
    await said(one, call("1", "search_replace", **FIX))

    assert "a - b" in (await said(other, call("1", "read_file", path="shop/core.py")))[0]


@pytest.mark.parametrize(
    ("limit", "words"), [("memory", "too much memory"), ("output", "printed"), ("disk", "space")]
)
async def test_a_command_that_broke_a_limit_says_which(
    make_node: MakeNode, order: Order, limit: str, words: str
) -> None:
    node = make_node(answer=lambda _: CommandOutcome(output=b"a\n", exit_code=137, ended_for=limit))
    environment = await opened(node, order)

    (answer,) = await said(environment, call("1", "run_terminal", command="yes"))

    assert answer.startswith("a\n[stopped: ")
    assert words in answer


async def test_a_repeated_call_is_answered_and_not_run(make_node: MakeNode, order: Order) -> None:
    numbers = itertools.count(1)
    node = make_node(answer=lambda _: CommandOutcome(output=b"%d" % next(numbers), exit_code=0))
    environment = await opened(node, order)
    asked = call("1", "run_terminal", command="date")

    assert await said(environment, asked) == ["1"]
    assert await said(environment, asked) == ["1"]
    assert await said(environment, asked, call("2", "run_terminal", command="date")) == ["1", "2"]


async def test_an_id_that_was_another_call_is_refused(make_node: MakeNode, order: Order) -> None:
    environment = await opened(make_node(), order)
    await said(environment, call("1", "list_dir", path="."))

    with pytest.raises(ReusedIdError):
        await said(environment, call("1", "list_dir", path="shop"))


@pytest.mark.parametrize("ids", [("", "1"), ("1", "1")])
async def test_every_call_needs_its_own_id(
    make_node: MakeNode, order: Order, ids: tuple[str, str]
) -> None:
    environment = await opened(make_node(), order)

    with pytest.raises(InvalidFieldError):
        await said(environment, *(call(i, "list_dir", path=".") for i in ids))


async def test_a_bad_call_is_an_answer(make_node: MakeNode, order: Order) -> None:
    environment = await opened(make_node(), order)
    garbage = environments_pb2.ToolCall(call_id="2", name="grep", arguments_json="{")

    results = await environment.run_turn([call("1", "no_such_tool"), garbage])

    assert [r.content for r in results] == [b"Error: bad call"] * 2
    assert all(r.error == environments_pb2.TOOL_ERROR_KIND_INVALID for r in results)


async def test_a_turn_runs_to_its_end_when_its_caller_leaves(
    make_node: MakeNode, order: Order
) -> None:
    node = make_node()
    assert isinstance(node.driver, MemoryDriver)
    node.driver.gate = asyncio.Event()
    environment = await opened(node, order)
    asked = call("1", "run_terminal", command="pytest -q")
    impatient = asyncio.create_task(environment.run_turn([asked]))
    await node.driver.command_started.wait()
    impatient.cancel()
    with pytest.raises(asyncio.CancelledError):
        await impatient

    retry = asyncio.create_task(said(environment, asked))
    await asyncio.sleep(0)
    node.driver.gate.set()

    assert await retry == ["FAILED test_add\n1 failed"]
    assert commands(node) == ["pytest -q"]


async def test_a_lease_that_ends_ends_its_turn(make_node: MakeNode, order: Order) -> None:
    node = make_node()
    assert isinstance(node.driver, MemoryDriver)
    node.driver.gate = asyncio.Event()
    environment = await opened(node, order)
    turn = asyncio.create_task(said(environment, call("1", "run_terminal", command="x")))
    await node.driver.command_started.wait()

    await node.close(["a"])

    with pytest.raises(UnknownIdError):
        await turn
    with pytest.raises(UnknownIdError):
        node.find("a")
    with pytest.raises(UnknownIdError):
        await said(environment, call("2", "list_dir", path="."))
    assert list(node.driver.leases.iterdir()) == []


async def test_the_same_files_and_command_are_run_once(make_node: MakeNode, order: Order) -> None:
    node = make_node()
    one, other = await opened(node, order, "a"), await opened(node, order, "b")
    test = call("1", "run_terminal", command="pytest -q")

    assert await said(one, test) == await said(other, test)
    assert commands(node) == ["pytest -q"]

    await said(other, call("2", "search_replace", **FIX))
    assert await said(other, call("3", "run_terminal", command="pytest -q")) == ["1 passed"]
    assert len(commands(node)) == 2


async def test_tests_that_change_files_are_run_each_time(make_node: MakeNode, order: Order) -> None:
    def answer(command: FolderCommand) -> CommandOutcome:
        with (command.workspace / "log").open("a") as file:
            file.write("x")
        return run_tests(command)

    node = make_node(answer=answer)
    one, other = await opened(node, order, "a"), await opened(node, order, "b")
    test = call("1", "run_terminal", command="pytest -q")
    await said(one, test)
    await said(other, test)

    assert len(commands(node)) == 2
    assert [f.path for f in (await other.diff()).written] == ["log"]


def broken(command: FolderCommand) -> CommandOutcome:
    raise SandboxError(f"{command.command}: no sandbox")


async def test_a_turn_that_the_platform_broke_without_a_trace_can_be_repeated(
    make_node: MakeNode, order: Order
) -> None:
    node = make_node(answer=broken)
    environment = await opened(node, order)
    test = call("1", "run_terminal", command="pytest -q")
    with pytest.raises(SandboxError):
        await said(environment, test)

    assert isinstance(node.driver, MemoryDriver)
    node.driver.answer = run_tests
    assert await said(environment, test) == ["FAILED test_add\n1 failed"]


async def test_a_turn_that_the_platform_broke_half_way_ends_its_lease(
    make_node: MakeNode, order: Order
) -> None:
    environment = await opened(make_node(answer=broken), order)
    calls = call("1", "search_replace", **FIX), call("2", "run_terminal", command="pytest -q")

    for _ in range(2):
        with pytest.raises(UnknownIdError):
            await said(environment, *calls)
    with pytest.raises(UnknownIdError):
        await environment.diff()


async def test_a_policy_that_fills_its_workspace_is_told_from_one_that_changed_nothing(
    make_node: MakeNode, order: Order, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "DIFF", folders.FolderLimits(max_files=3, max_bytes=1 << 20))
    environment = await opened(make_node(), order)
    await said(environment, call("1", "search_replace", **FIX))

    with pytest.raises(ChangeTooLargeError, match="more than 3 files"):
        await environment.diff()


async def test_a_pool_limits_what_a_policy_may_change(make_node: MakeNode, order: Order) -> None:
    node = make_node()
    node.change_limits = folders.FolderLimits(max_files=10, max_bytes=8)
    environment = await opened(node, order)
    assert await environment.diff() == environments_pb2.WorkspaceDiff()
    await said(environment, call("1", "search_replace", **FIX))

    with pytest.raises(ChangeTooLargeError, match="or 8 bytes"):
        await environment.diff()


async def test_a_turn_whose_results_no_message_can_carry_says_so(
    make_node: MakeNode, order: Order, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results_module, "MAX_TURN_BYTES", 10)
    node = make_node(
        answer=lambda command: CommandOutcome(output=command.command.encode(), exit_code=0)
    )
    environment = await opened(node, order)
    texts = ("12345678", "123", "1")

    said_each = await said(
        environment, *(call(text, "run_terminal", command=text) for text in texts)
    )

    assert said_each[0] == "12345678"
    assert all("too long together" in text for text in said_each[1:])


async def test_only_so_many_results_are_kept_and_the_newest_always(
    make_node: MakeNode, order: Order, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results_module, "MAX_STORED_BYTES", 3)
    numbers = itertools.count(10)
    node = make_node(answer=lambda _: CommandOutcome(output=b"%d" % next(numbers), exit_code=0))
    environment = await opened(node, order)
    first, second = (call(i, "run_terminal", command="date") for i in "12")

    assert await said(environment, first) == ["10"]
    assert await said(environment, second) == ["11"]
    assert await said(environment, second) == ["11"]
    assert await said(environment, first) == ["12"]


async def test_a_turn_of_too_many_calls_is_refused(make_node: MakeNode, order: Order) -> None:
    environment = await opened(make_node(), order)

    with pytest.raises(InvalidFieldError):
        await said(environment, *(call(str(n), "list_dir", path=".") for n in range(257)))
