"""The tools of a sandbox through the protocol's own client."""

import contextlib
import json
import urllib.request
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx2
import pytest
from mcp.client.client import Client
from mcp.client.streamable_http import streamable_http_client

from etude.agent.toolsets import toolset

Edge = Any  # the fixture's class lives in conftest, which test modules cannot import
CALLS: dict[str, dict[str, Any]] = {
    "write_file": {"path": "shop.py", "content": "def add(a, b):\n    return a - b\n"},
    "read_file": {"path": "shop.py"},
    "search_replace": {"path": "shop.py", "old_string": "a - b", "new_string": "a + b"},
    "list_dir": {"path": "."},
    "glob": {"pattern": "*.py"},
    "grep": {"pattern": "return"},
    "run_terminal": {"command": "python3 -c 'import shop; print(shop.add(1, 2))'"},
    "read_lints": {"paths": ["shop.py"]},
    "delete_file": {"path": "shop.py"},
}
"""In an order in which they work; what else there is may answer that the call does not fit."""


@pytest.fixture
def made(edge: Edge) -> Iterator[dict[str, Any]]:
    def ask(path: str, data: bytes | None, method: str) -> dict[str, Any]:
        headers = {"X-API-KEY": edge.key}
        request = urllib.request.Request(edge.url + path, data, headers, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            found: dict[str, Any] = json.loads(answer.read() or b"{}")
            return found

    sandbox = ask("/v2/sandboxes", b'{"templateID": "python"}', "POST")
    yield sandbox | {"url": f"{edge.url}/mcp/{sandbox['sandboxID']}"}
    ask(f"/sandboxes/{sandbox['sandboxID']}", None, "DELETE")


@contextlib.asynccontextmanager
async def connected(made: dict[str, Any]) -> AsyncIterator[Client]:
    """No fixture: a client must be closed by the task that opened it."""
    headers = {"Authorization": f"Bearer {made['toolsAccessToken']}"}
    async with (
        httpx2.AsyncClient(headers=headers, timeout=60) as http,
        Client(streamable_http_client(made["url"], http_client=http)) as opened,
    ):
        yield opened


def text(result: Any) -> str:
    return "".join(part.text for part in result.content)


async def test_the_client_lists_every_tool_with_its_arguments(made: dict[str, Any]) -> None:
    async with connected(made) as client:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}

    assert set(tools) == set(toolset("Standard").tools)
    assert tools["read_file"].input_schema["required"] == ["path"]
    assert all(tool.description for tool in tools.values())


async def test_the_client_calls_every_tool(made: dict[str, Any]) -> None:
    answers = {}
    async with connected(made) as client:
        for name, arguments in CALLS.items():
            result = await client.call_tool(name, arguments)
            assert not result.is_error, (name, text(result))
            answers[name] = text(result)
        for name in set(toolset("Standard").tools) - CALLS.keys():
            assert text(await client.call_tool(name, {}))

    assert answers["read_file"] == "1|def add(a, b):\n2|    return a - b"
    assert answers["run_terminal"].startswith("3")


async def test_nothing_but_tools_can_be_called(made: dict[str, Any]) -> None:
    async with connected(made) as client:
        for name in ("reset", "step", "state", "snapshot", "grade", "exec", "diff"):
            result = await client.call_tool(name, {})
            assert result.is_error
            assert f"no tool '{name}'" in text(result)


async def test_a_tool_that_refuses_says_why(made: dict[str, Any]) -> None:
    async with connected(made) as client:
        for arguments in ({"path": "../../etc/passwd"}, {"path": "missing"}, {}, {"nope": 1}):
            result = await client.call_tool("read_file", arguments)
            assert result.is_error
            assert text(result).startswith("Error: ")
