"""The two toolsets, and the order in which the calls of one turn take effect."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import override

from etude.agent.tool_calls import MalformedCall, ParsedCall
from etude.agent.tools.base import ErrorKind
from etude.agent.toolsets import run_calls, tool_schema, toolset
from etude.agent.workspace import ExecResult, MemoryWorkspace, Workspace, WorkspaceLostError
from etude.common.errors import InvalidFieldError

MakeWorkspace = Callable[[dict[str, bytes]], Workspace]
SHOP = {
    "shop/core.py": b"def add_price(a, b):\n    return a - b\n",
    "shop/util.py": b"def last(xs):\n    return xs[-1]\n",
    "tests/test_repo.py": b"from shop.core import add_price\n",
    "setup.cfg": b"[add_price]\n",
    ".hidden.py": b"add_price\n",
}


def call(name: str, **arguments: object) -> ParsedCall:
    return ParsedCall(name=name, arguments=arguments)


async def no_shell(command: str, timeout_s: float) -> ExecResult:
    raise AssertionError(f"no command should run: {command} {timeout_s}")


def test_the_compact_prompt_is_the_one_that_the_demo_was_measured_with() -> None:
    assert toolset("Compact").system_prompt == (
        "Fix the bug. Tools: read_file(path) search_replace(path, old_string, new_string)"
        " list_dir(path) grep(pattern) run_terminal(command)"
    )


def test_the_standard_prompt_tells_every_tool_and_argument() -> None:
    standard = toolset("Standard")
    assert list(standard.tools) == [
        "read_file",
        "write_file",
        "search_replace",
        "apply_patch",
        "delete_file",
        "list_dir",
        "glob",
        "grep",
        "codebase_search",
        "run_terminal",
        "terminal_io",
        "read_lints",
        "todo_write",
        "finish",
    ]
    for row in standard.system_prompt.partition("Tools:\n")[2].splitlines():
        told = json.loads(row)
        assert told["description"]
        assert all(field["description"] for field in told["parameters"]["properties"].values())


def test_schemas_are_in_the_form_of_chat_endpoints() -> None:
    name, tool = next(iter(toolset("Compact").tools.items()))
    assert tool_schema(name, tool) == {
        "type": "function",
        "function": {
            "name": "read_file",
            "description": "Read a file.",
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string", "description": "File."}},
                "required": ["path"],
                "additionalProperties": False,
            },
        },
    }


def test_an_unknown_toolset_is_refused_by_name() -> None:
    with pytest.raises(InvalidFieldError, match="'Huge' is none of Standard, Compact"):
        toolset("Huge")


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (call("read_file", path="shop/util.py"), "def last(xs):\n    return xs[-1]"),
        (call("read_file", path="none.py"), "Error: no such file"),
        (call("read_file", path="../x"), "Error: no such file"),
        (call("list_dir", path="."), "shop/core.py\nshop/util.py"),
        (call("list_dir", path="shop/"), "shop/core.py\nshop/util.py"),
        (call("list_dir", path="tests"), ""),
        (call("list_dir", path="shop/core.py"), "Error: no such file"),
        (call("list_dir", path="none"), "Error: no such file"),
        (call("grep", pattern="add_price("), "shop/core.py: def add_price(a, b):"),
        (
            call("grep", pattern="add_price"),
            "setup.cfg: [add_price]\nshop/core.py: def add_price(a, b):",
        ),
        (call("grep", pattern="(?"), "no match"),
        (call("search_replace", path="shop/core.py", old_string="a - b", new_string="a + b"), "ok"),
        (
            call("search_replace", path="shop/core.py", old_string="a * b", new_string=""),
            "Error: old_string not found",
        ),
        (
            call("search_replace", path="shop/core.py", old_string="", new_string="x"),
            "Error: old_string not found",
        ),
        (
            call("search_replace", path="shop/core.py", old_string="a", new_string=""),
            "Error: old_string not unique",
        ),
        (
            call("search_replace", path="none.py", old_string="a", new_string=""),
            "Error: no such file",
        ),
        (call("run_terminal", command="pytest -q"), "pytest -q within 30 s"),
        (call("fly"), "Error: bad call"),
        (call("read_file"), "Error: bad call"),
        (call("read_file", path="a", offset="1"), "Error: bad call"),
        (MalformedCall(reason="whatever"), "Error: bad call"),
    ],
)
async def test_compact_results_are_terse(
    make_workspace: MakeWorkspace, made: ParsedCall | MalformedCall, text: str
) -> None:
    (outcome,) = await run_calls(toolset("Compact"), make_workspace(SHOP), [made])
    assert outcome.content == text
    assert outcome.is_error is text.startswith("Error:")
    assert (outcome.kind is ErrorKind.INVALID) is (text == "Error: bad call")


async def test_compact_grep_stops_at_three_lines(make_workspace: MakeWorkspace) -> None:
    workspace = make_workspace({"a.py": b"  x\n" * 9})
    (outcome,) = await run_calls(toolset("Compact"), workspace, [call("grep", pattern="x")])
    assert outcome.content == "a.py: x\na.py: x\na.py: x"


async def test_compact_says_when_a_command_ran_out_of_time() -> None:
    async def slow(command: str, timeout_s: float) -> ExecResult:
        return ExecResult(output=b"", exit_code=-9, timed_out=True)

    workspace = MemoryWorkspace({}, slow)
    (outcome,) = await run_calls(toolset("Compact"), workspace, [call("run_terminal", command="x")])
    assert (outcome.content, outcome.kind) == ("Error: timed out", ErrorKind.TIMEOUT)


async def test_a_turn_sees_its_own_edits_in_order(make_workspace: MakeWorkspace) -> None:
    workspace = make_workspace({"a.py": b"one"})
    outcomes = await run_calls(
        toolset("Compact"),
        workspace,
        [
            call("read_file", path="a.py"),
            call("search_replace", path="./a.py", old_string="one", new_string="two"),
            call("search_replace", path="a.py", old_string="two", new_string="three"),
            call("grep", pattern="three"),
            call("read_file", path="a.py"),
        ],
    )
    assert [outcome.content for outcome in outcomes] == ["one", "ok", "ok", "a.py: three", "three"]


async def test_a_failed_call_stops_no_other() -> None:
    outcomes = await run_calls(
        toolset("Standard"),
        MemoryWorkspace({"a": b"x"}, no_shell),
        [
            call("read_file", path="none"),
            MalformedCall(reason="<tool_call> without </tool_call>"),
            call("grep", pattern="("),
            call("read_file", path="a"),
        ],
    )
    assert [outcome.kind for outcome in outcomes] == [
        ErrorKind.TOOL,
        ErrorKind.INVALID,
        ErrorKind.TOOL,
        ErrorKind.NONE,
    ]
    assert outcomes[1].content == "Error: malformed call: <tool_call> without </tool_call>"


async def test_calls_beyond_the_limit_are_answered_and_not_run() -> None:
    workspace = MemoryWorkspace({}, no_shell)
    many = [call("write_file", path=f"f{n}", content="") for n in range(70)]
    outcomes = await run_calls(toolset("Standard"), workspace, many)
    assert len(workspace.files) == 64
    assert outcomes[64].content == "Error: at most 64 calls in one turn; this one was not run"
    assert [outcome.kind for outcome in outcomes[64:]] == [ErrorKind.INVALID] * 6


async def test_a_turn_without_calls_has_no_results() -> None:
    assert await run_calls(toolset("Standard"), MemoryWorkspace({}, no_shell), []) == []


@dataclass(slots=True)
class Busy:
    """Counts how many commands and file operations are under way at once."""

    running: list[str] = field(default_factory=list)
    together: list[frozenset[str]] = field(default_factory=list)

    async def enter(self, what: str) -> None:
        self.running.append(what)
        for _ in range(5):
            await asyncio.sleep(0)
        self.together.append(frozenset(self.running))
        self.running.remove(what)


@dataclass(slots=True)
class SlowWorkspace(MemoryWorkspace):
    """A memory workspace whose reads and writes take a few turns of the event loop."""

    busy: Busy = field(default_factory=Busy)

    @override
    async def read(self, path: str) -> bytes:
        await self.busy.enter(f"read {path}")
        return await MemoryWorkspace.read(self, path)

    @override
    async def write(self, path: str, data: bytes) -> None:
        await self.busy.enter(f"write {path}")
        await MemoryWorkspace.write(self, path, data)

    @override
    async def exec(self, command: str, *, timeout_s: float) -> ExecResult:
        await self.busy.enter(f"exec {command}")
        return ExecResult(output=repr(sorted(self.files.items())).encode(), exit_code=0)


async def test_reads_of_one_turn_run_at_the_same_time() -> None:
    workspace = SlowWorkspace({"a": b"1", "b": b"2", "c": b"3"}, no_shell)
    await run_calls(toolset("Compact"), workspace, [call("read_file", path=p) for p in "abc"])
    assert frozenset({"read a", "read b", "read c"}) in workspace.busy.together


async def test_nothing_runs_beside_a_command() -> None:
    workspace = SlowWorkspace({"a": b"1"}, no_shell)
    calls = [
        call("read_file", path="a"),
        call("run_terminal", command="one"),
        call("run_terminal", command="two"),
        call("read_file", path="a"),
    ]
    await run_calls(toolset("Compact"), workspace, calls)
    assert workspace.busy.together == [
        {"read a"},
        {"exec one"},
        {"exec two"},
        {"read a"},
    ]


paths = st.sampled_from(["a", "b"])
texts = st.sampled_from(["", "x", "y"])
any_call = st.one_of(
    st.builds(lambda p: call("read_file", path=p), paths),
    st.builds(lambda p, c: call("write_file", path=p, content=c), paths, texts),
    st.builds(lambda p: call("delete_file", path=p), paths),
    st.just(call("list_dir")),
    st.just(call("grep", pattern="x")),
    st.just(call("run_terminal", command="ls")),
    st.just(call("nonsense")),
)


@given(st.lists(any_call, max_size=8))
def test_a_turn_gives_the_results_of_its_calls_one_by_one(calls: list[ParsedCall]) -> None:
    async def both() -> None:
        tools = toolset("Standard")
        together, alone = SlowWorkspace({"a": b"x"}, no_shell), SlowWorkspace({"a": b"x"}, no_shell)
        outcomes = await run_calls(tools, together, calls)
        expected = [(await run_calls(tools, alone, [each]))[0] for each in calls]
        assert outcomes == expected
        assert together.files == alone.files

    asyncio.run(both())


@dataclass(slots=True)
class LostWorkspace(MemoryWorkspace):
    """A workspace whose machine is gone."""

    @override
    async def read(self, path: str) -> bytes:
        raise WorkspaceLostError("the machine is gone")


@pytest.mark.parametrize("count", [1, 3])
async def test_a_lost_workspace_is_raised_and_is_no_result(count: int) -> None:
    reads = [call("read_file", path=f"f{n}") for n in range(count)]
    with pytest.raises(WorkspaceLostError, match="the machine is gone"):
        await run_calls(toolset("Compact"), LostWorkspace({}, no_shell), reads)
