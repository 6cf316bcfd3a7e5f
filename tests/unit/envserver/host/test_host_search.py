"""Searches of leases: one index for all that begin with the same files."""

import json
from collections.abc import Callable
from pathlib import Path

from etude.envserver.host.environment import LeasedEnvironment
from etude.envserver.host.host import Host
from etude.v1 import environments_pb2

MakeNode = Callable[..., Host]
Order = Callable[..., environments_pb2.OpenEnvironmentsRequest]


async def open_leases(node: Host, order: Order, *names: str, uri: str) -> list[LeasedEnvironment]:
    request = order(*names, uri=uri)
    request.toolset = "Standard"
    await node.open(request)
    return [node.find(name) for name in names]


async def run(environment: LeasedEnvironment, tool: str, number: int, **arguments: object) -> str:
    call = environments_pb2.ToolCall(
        call_id=f"{tool}-{number}", name=tool, arguments_json=json.dumps(arguments)
    )
    (result,) = await environment.run_turn([call])
    return result.content.decode()


async def test_leases_of_one_template_share_an_index_and_no_edits(
    make_node: MakeNode, order: Order, source: str
) -> None:
    node = make_node()
    one, other = await open_leases(node, order, "one", "other", uri=source)
    asked = {"query": "add a and b"}
    before = await run(one, "codebase_search", 0, **asked)
    assert "shop/core.py:1-2\n1|def add(a, b):\n" in before
    await run(one, "write_file", 0, path="shop/core.py", content="def sub():\n    pass\n")
    assert "def add(" not in await run(one, "codebase_search", 1, **asked)
    assert await run(other, "codebase_search", 0, **asked) == before
    assert one.source.index is other.source.index


async def test_files_that_the_image_brought_are_searched_too(
    make_node: MakeNode, order: Order, source: str, tmp_path: Path
) -> None:
    (environment,) = await open_leases(make_node(), order, "one", uri=source)
    await run(environment, "list_dir", 0, path=".")
    root = tmp_path / "scratch" / "leases" / "one" / "workspace"
    for number in range(10):
        (root / f"image_{number}.py").write_text(f"def parse_header_{number}():\n    pass\n")
    found = await run(environment, "codebase_search", 0, query="parse header 7")
    assert found.startswith("image_7.py:1-2\n")
