"""MCP servers of packages: their tools beside Standard's, each call bounded, hostile ones too."""

import asyncio
import json
import os
import shlex
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.support.installed_package import install_package

from etude.agent.tool_calls import ParsedCall
from etude.agent.tools import mcp_listing
from etude.agent.tools.base import ErrorKind, ToolOutcome
from etude.agent.tools.mcp_server import parse_listing, read_server
from etude.agent.toolsets import Toolset, make_toolset, run_calls, toolset
from etude.agent.workspace import ExecResult, FolderWorkspace
from etude.common.api.run.rollout_policy import RolloutPolicy
from etude.common.errors import UserError

PYTHON = "/usr/bin/python3"
LISTING = {
    "tools": [
        {
            "name": "count_words",
            "description": "Count the words of a text.",
            "inputSchema": {
                "type": "object",
                "properties": {
                    "text": {"type": "string", "description": "The text."},
                    "at_least": {"type": "integer", "default": 0},
                    "only": {"$ref": "#/$defs/Words"},
                },
                "required": ["text"],
                "$defs": {"Words": {"type": "array", "items": {"type": "string"}}},
            },
        }
    ]
}
SERVER = f"""
import json, sys
LISTING = json.loads({json.dumps(json.dumps(LISTING))})

def answer(asked):
    method, given = asked["method"], asked.get("params", {{}})
    if method == "initialize":
        return {{"protocolVersion": "2025-03-26", "capabilities": {{"tools": {{}}}},
                 "serverInfo": {{"name": "words", "version": "1"}}}}
    if method == "tools/list":
        return LISTING
    text = json.dumps(given["arguments"], sort_keys=True)
    return {{"content": [{{"type": "text", "text": text}}]}}

for line in sys.stdin:
    asked = json.loads(line)
    if "id" in asked:
        print(json.dumps({{"jsonrpc": "2.0", "method": "notifications/message", "params": {{}}}}))
        print(json.dumps({{"jsonrpc": "2.0", "id": asked["id"], "result": answer(asked)}}))
        sys.stdout.flush()
"""
HANDSHAKE = """
import json, os, sys, time
def say(**message):
    print(json.dumps(message), flush=True)
sys.stdin.readline()
say(id="etude-1", result={})
sys.stdin.readline()
sys.stdin.readline()
"""


async def run_shell(folder: Path, command: str, timeout_s: float) -> ExecResult:
    shell = await asyncio.create_subprocess_exec(
        *("/bin/sh", "-c", command),
        cwd=folder,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = await asyncio.wait_for(shell.communicate(), timeout_s)
    except TimeoutError:
        os.killpg(shell.pid, signal.SIGKILL)
        await shell.wait()
        return ExecResult(output=b"", exit_code=143, timed_out=True)
    return ExecResult(output=output, exit_code=shell.returncode or 0)


def make_workspace(folder: Path) -> FolderWorkspace:
    return FolderWorkspace(folder, lambda command, limit_s: run_shell(folder, command, limit_s))


def serve(folder: Path, source: str, *, timeout_s: float = 20.0) -> Toolset:
    """A toolset of one server, whose program and listing are in the folder."""
    (folder / "server.py").write_text(source)
    (folder / "tools.json").write_text(json.dumps(LISTING))
    command = (PYTHON, str(folder / "server.py"))
    server = read_server(command, folder / "tools.json", timeout_s=timeout_s)
    return make_toolset("acme.Words", server.tools)


async def call(tools: Toolset, folder: Path, arguments: Mapping[str, object]) -> ToolOutcome:
    made = ParsedCall(name="count_words", arguments=dict(arguments))
    (outcome,) = await run_calls(tools, make_workspace(folder), [made])
    return outcome


def test_a_policy_reads_the_listing_of_the_package(tmp_path: Path) -> None:
    tools = serve(tmp_path, SERVER)
    row = json.loads(tools.system_prompt.splitlines()[-1])
    assert row["name"] == "count_words"
    assert row["description"] == "Count the words of a text."
    assert row["parameters"]["properties"]["only"] == {"type": "array", "items": {"type": "string"}}
    assert row["parameters"]["required"] == ["text"]


async def test_a_call_reaches_the_server_with_arguments_of_their_types(tmp_path: Path) -> None:
    tools = serve(tmp_path, SERVER)
    given = {"text": 'it\'s\n$(x) "ü"', "at_least": "3", "only": '["a", "b"]'}
    done = await call(tools, tmp_path, given)
    assert not done.is_error, done
    assert json.loads(done.content) == {**given, "at_least": 3, "only": ["a", "b"]}
    kept = [info.path for info in await make_workspace(tmp_path).list(".")]
    assert kept == ["server.py", "tools.json"]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({}, "argument 'text' is missing"),
        ({"text": "x", "at_least": "many"}, "argument 'at_least': Input should be a valid integer"),
        ({"text": "x", "other": "y"}, "there is no argument 'other'; it takes text, at_least"),
        ({"text": "x" * 70_000}, "the arguments are longer than 65536 bytes"),
        ({"text": "\ud800"}, "half a character"),
    ],
)
async def test_a_bad_call_is_refused_before_the_server_starts(
    tmp_path: Path, arguments: dict[str, object], why: str
) -> None:
    done = await call(serve(tmp_path, "raise SystemExit('started')"), tmp_path, arguments)
    assert done.kind is ErrorKind.INVALID
    assert why in done.content


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("raise SystemExit('no config')", "ended without an answer: no config"),
        ("import sys; sys.stdin.close()", "ended without an answer: no output"),
        (HANDSHAKE, "ended without an answer: no output"),
        (HANDSHAKE + "print('\"etude-2\" [')", "is no JSON-RPC message"),
        (HANDSHAKE + "print('[' * 50_000 + '\"etude-2\"')", "is no JSON-RPC message"),
        (HANDSHAKE + "say(id='x', result={'to': 'etude-2'})", "is to another request"),
        (HANDSHAKE + "say(id='etude-2')", "has no result"),
        (HANDSHAKE + "say(id='etude-2', error={'code': 1, 'message': 'x' * 9000})", "x" * 500),
        (HANDSHAKE + "say(id='etude-2', result={'x': 'y' * 9_000_000})", "too large"),
    ],
)
async def test_a_hostile_server_is_an_error_of_its_call(
    tmp_path: Path, source: str, why: str
) -> None:
    done = await call(serve(tmp_path, source), tmp_path, {"text": "x"})
    assert done.kind is ErrorKind.TOOL
    assert done.content.startswith("Error: ")
    assert why in done.content
    assert len(done.content) < 1_000


@pytest.mark.parametrize(
    "source",
    ["import time; time.sleep(60)", HANDSHAKE + "time.sleep(60)", HANDSHAKE + "while 1: say()"],
)
async def test_a_server_that_never_answers_is_stopped(tmp_path: Path, source: str) -> None:
    done = await call(serve(tmp_path, source, timeout_s=1.0), tmp_path, {"text": "x"})
    assert done.kind is ErrorKind.TIMEOUT
    assert "did not answer in time" in done.content


async def test_results_say_what_cannot_be_shown_and_what_failed(tmp_path: Path) -> None:
    content = [{"type": "image", "data": "AA=="}, {"type": "text", "text": "seen"}, 3]
    source = f"say(id='etude-2', result={{'isError': True, 'content': {content!r}}})"
    done = await call(serve(tmp_path, HANDSHAKE + source), tmp_path, {"text": "x"})
    assert done.kind is ErrorKind.TOOL
    assert done.content == "[image, which cannot be shown]\nseen"


@pytest.mark.parametrize(
    ("listing", "why"),
    [
        ({"tools": []}, "at least 1 item"),
        ({"tools": LISTING["tools"] * 2}, "names tools twice: count_words"),
        ({"tools": [{**LISTING["tools"][0], "name": "a b"}]}, "should match pattern"),
        ({"tools": [{**LISTING["tools"][0], "description": ""}]}, "at least 1 character"),
        ({**LISTING, "nextCursor": "2"}, "nextCursor"),
    ],
)
def test_listings_that_cannot_be_shown_are_refused(listing: object, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_listing(json.dumps(listing).encode())


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ({"A": {"$ref": "#/$defs/A"}}, "refers to itself"),
        ({}, "refers to '#/\\$defs/A'"),
        (
            {chr(65 + i): {"anyOf": [{"$ref": f"#/$defs/{chr(66 + i)}"}] * 9} for i in range(5)}
            | {"F": {}},
            "more than 2000 parts",
        ),
    ],
)
def test_schemas_without_end_are_refused(parts: dict[str, object], why: str) -> None:
    schema = {"properties": {"x": {"$ref": "#/$defs/A"}}, "$defs": parts}
    tool = {"name": "t", "description": "d", "inputSchema": schema}
    with pytest.raises(ValueError, match=why):
        parse_listing(json.dumps({"tools": [tool]}).encode())


PACKAGE = """
from pathlib import Path
from etude.agent.tools.mcp_server import read_server
SERVER = read_server(("python3", "words.py"), Path(__file__).with_name("tools.json"))
"""


def install(folder: Path, patch: pytest.MonkeyPatch, **entries: str) -> None:
    groups = {f"etude.{group}": {"acme.Words": value} for group, value in entries.items()}
    install_package(folder, patch, name="acme_words", source=PACKAGE, entries=groups)


def test_a_phase_names_a_server_of_a_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tools.json").write_text(json.dumps(LISTING))
    install(tmp_path, monkeypatch, mcp_servers="acme_words:SERVER")
    tools = toolset(RolloutPolicy.model_validate({"toolset": "acme.Words"}).toolset)
    assert tools.name == "acme.Words"
    assert list(tools.tools) == [*toolset("Standard").tools, "count_words"]


def test_a_server_may_not_replace_a_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listing = {"tools": [{**LISTING["tools"][0], "name": "grep"}]}
    (tmp_path / "tools.json").write_text(json.dumps(listing))
    install(tmp_path, monkeypatch, mcp_servers="acme_words:SERVER")
    with pytest.raises(UserError, match="has tools of Standard's names: grep"):
        toolset("acme.Words")


def test_one_name_is_not_a_server_and_a_toolset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tools.json").write_text(json.dumps(LISTING))
    install(tmp_path, monkeypatch, mcp_servers="acme_words:SERVER", toolsets="acme_words:SERVER")
    with pytest.raises(UserError, match="is a toolset too"):
        toolset("acme.Words")


async def test_the_official_package_s_servers_are_listed_and_called(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "server.py"
    program.write_text(
        "from mcp.server.mcpserver import MCPServer\n"
        "server = MCPServer('words')\n\n"
        "@server.tool()\n"
        "def count_words(text: str, only: list[str] | None = None) -> str:\n"
        "    '''Count the words of a text.'''\n"
        "    return f'{len(text.split())} words'\n\n"
        "server.run('stdio')\n"
    )
    command = [sys.executable, str(program)]
    assert mcp_listing.main(command) == 0
    listing = tmp_path / "tools.json"
    listing.write_text(capsys.readouterr().out)
    server = read_server(command, listing)
    done = await call(make_toolset("acme.Words", server.tools), tmp_path, {"text": "one two"})
    assert done.content == "2 words", shlex.join(command)


def test_a_server_without_an_answer_has_no_listing(capsys: pytest.CaptureFixture[str]) -> None:
    assert mcp_listing.main(["/nonexistent/server"]) == 1
    assert "ended without an answer" in capsys.readouterr().err
