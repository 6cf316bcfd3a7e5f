"""What each tool of the Standard set answers."""

from collections.abc import Callable

import pytest

from etude.agent.tool_calls import ParsedCall
from etude.agent.tools.base import ErrorKind, ToolOutcome
from etude.agent.toolsets import run_calls, toolset
from etude.agent.workspace import ExecResult, MemoryWorkspace, Workspace

MakeWorkspace = Callable[[dict[str, bytes]], Workspace]
FILES = {
    "shop/core.py": b"def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n",
    "dos.txt": b"one\r\ntwo\r\n",
    "empty.txt": b"",
    "logo.png": b"\x89PNG\0",
    ".env": b"KEY=1\n",
}


async def use(workspace: Workspace, name: str, **arguments: object) -> ToolOutcome:
    (outcome,) = await run_calls(
        toolset("Standard"), workspace, [ParsedCall(name=name, arguments=arguments)]
    )
    return outcome


@pytest.fixture
def workspace(make_workspace: MakeWorkspace) -> Workspace:
    return make_workspace(FILES)


async def test_read_file_numbers_its_lines(workspace: Workspace) -> None:
    assert (await use(workspace, "read_file", path="dos.txt")).content == "1|one\n2|two"


async def test_read_file_shows_a_window_and_says_how_to_go_on(workspace: Workspace) -> None:
    shown = await use(workspace, "read_file", path="shop/core.py", offset="2", limit="1")
    assert shown.content == (
        "2|    return a + b\n[... 4 lines, 34 bytes omitted; go on with offset=3 ...]"
    )
    assert shown.omitted_bytes == 34


async def test_read_file_cuts_the_middle_of_a_wide_window(make_workspace: MakeWorkspace) -> None:
    workspace = make_workspace({"wide.txt": b"x" * 99 + b"\n" + (b"y" * 999 + b"\n") * 100})
    shown = await use(workspace, "read_file", path="wide.txt")
    assert shown.omitted_bytes > 0
    assert len(shown.content) < (64 << 10) + 100
    assert f"{shown.omitted_bytes} bytes omitted; use offset and limit" in shown.content


@pytest.mark.parametrize(
    ("path", "offset", "text"),
    [
        ("empty.txt", 1, "(empty file)"),
        ("empty.txt", 2, "Error: empty.txt has 0 lines; offset 2 is past them"),
        ("logo.png", 1, "Error: logo.png is a binary file of 5 bytes"),
        ("none.py", 1, "Error: none.py: no such file"),
        ("shop", 1, "Error: shop: is a folder"),
        ("../x", 1, "Error: ../x: is outside of the workspace"),
        ("a\0b", 1, "Error: a\\0b: is not a usable path"),
    ],
)
async def test_read_file_says_what_it_cannot_show(
    workspace: Workspace, path: str, offset: int, text: str
) -> None:
    assert (await use(workspace, "read_file", path=path, offset=offset)).content == text


async def test_broken_utf8_is_shown_as_replacement(make_workspace: MakeWorkspace) -> None:
    workspace = make_workspace({"a": b"\xff\n"})
    assert (await use(workspace, "read_file", path="a")).content == "1|\ufffd"


async def test_write_file_creates_and_replaces(workspace: Workspace) -> None:
    made = await use(workspace, "write_file", path="new/é.txt", content="é\n")
    assert made.content == "Created new/é.txt (3 bytes)."
    again = await use(workspace, "write_file", path="new/é.txt", content="")
    assert again.content == "Replaced new/é.txt (0 bytes)."
    assert await workspace.read("new/é.txt") == b""


async def test_delete_file_deletes_one_file(workspace: Workspace) -> None:
    assert (await use(workspace, "delete_file", path="dos.txt")).content == "Deleted dos.txt."
    gone = await use(workspace, "delete_file", path="dos.txt")
    assert gone.content == "Error: dos.txt: no such file"
    assert (await use(workspace, "delete_file", path="shop")).content == "Error: shop: is a folder"


async def test_list_dir_leaves_out_dotfiles_and_ignored_names(workspace: Workspace) -> None:
    assert (await use(workspace, "list_dir")).content == "dos.txt\nempty.txt\nlogo.png\nshop/"
    ignored = await use(workspace, "list_dir", ignore_globs="*.txt\nshop")
    assert ignored.content == "logo.png"
    as_json = await use(workspace, "list_dir", ignore_globs='["*.txt", "shop"]')
    assert as_json.content == "logo.png"


async def test_glob_lists_matching_paths(workspace: Workspace) -> None:
    assert (await use(workspace, "glob", pattern="**/*.py")).content == "shop/core.py"
    assert (await use(workspace, "glob", pattern="*.rs")).content == "No files match."


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"pattern": "def"}, "shop/core.py:1:def add(a, b):\nshop/core.py:5:def sub(a, b):"),
        ({"pattern": "def", "output_mode": "files_with_matches"}, "shop/core.py"),
        ({"pattern": "def", "output_mode": "count"}, "shop/core.py:2"),
        ({"pattern": "ONE", "-i": "true"}, "dos.txt:1:one"),
        ({"pattern": "nothing"}, "No matches."),
        ({"pattern": "one", "type": "py"}, "No matches."),
        ({"pattern": "one", "glob": "*.txt"}, "dos.txt:1:one"),
        ({"pattern": "two", "path": "dos.txt", "-B": "1"}, "dos.txt-1-one\ndos.txt:2:two"),
        (
            {"pattern": "return", "-A": 1, "path": "shop"},
            "shop/core.py:2:    return a + b\nshop/core.py-3-\n--\nshop/core.py:6:    return a - b",
        ),
        ({"pattern": "("}, "Error: '(': missing )"),
    ],
)
async def test_grep_prints_like_ripgrep(
    workspace: Workspace, arguments: dict[str, object], text: str
) -> None:
    assert (await use(workspace, "grep", **arguments)).content == text


async def test_grep_says_how_many_matches_it_leaves_out(make_workspace: MakeWorkspace) -> None:
    workspace = make_workspace({"a.txt": b"x\n" * 250})
    shown = await use(workspace, "grep", pattern="x")
    assert shown.content.count("a.txt:") == 200
    assert "[... 50 matching lines omitted; narrow pattern, path or glob ...]" in shown.content


@pytest.mark.parametrize(
    ("done", "text", "kind"),
    [
        (ExecResult(output=b"hi\n", exit_code=0), "hi", ErrorKind.NONE),
        (ExecResult(output=b"", exit_code=0), "(no output)", ErrorKind.NONE),
        (ExecResult(output=b"no\n", exit_code=2), "no\n[exit code 2]", ErrorKind.NONE),
        (
            ExecResult(output=b"part", exit_code=-9, timed_out=True),
            "part\n[stopped after 7 s]",
            ErrorKind.TIMEOUT,
        ),
    ],
)
async def test_run_terminal_shows_output_and_status(
    done: ExecResult, text: str, kind: ErrorKind
) -> None:
    async def run(command: str, timeout_s: float) -> ExecResult:
        assert (command, timeout_s) == ("true", 7)
        return done

    shown = await use(MemoryWorkspace({}, run), "run_terminal", command="true", timeout="7")
    assert (shown.content, shown.kind) == (text, kind)


async def test_run_terminal_counts_what_the_runner_dropped() -> None:
    async def run(command: str, timeout_s: float) -> ExecResult:
        output = b"x\n" * 20_000
        return ExecResult(
            output=output, exit_code=0, dropped_bytes=10**9, dropped_lines=10, cpu_ms=5
        )

    shown = await use(MemoryWorkspace({}, run), "run_terminal", command="yes")
    assert shown.omitted_bytes > 10**9
    assert f"{shown.omitted_bytes} bytes omitted; redirect the output" in shown.content
    assert shown.cpu_ms == 5


@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("fly", {}, "Error: no tool 'fly'; there are read_file write_file"),
        ("read_file", {}, "Error: read_file: argument 'path' is missing"),
        ("read_file", {"path": "a", "lines": "1"}, "there is no argument 'lines'; it takes path,"),
        ("read_file", {"path": 3}, "argument 'path': Input should be a valid string"),
        ("read_file", {"path": "a", "offset": "-1"}, "argument 'offset': Input should be greater"),
        ("read_file", {"path": "a", "offset": "one"}, "argument 'offset': Input should be a valid"),
        ("grep", {"pattern": ""}, "argument 'pattern': "),
        ("grep", {"pattern": "x", "type": "perl"}, "argument 'type': unknown type 'perl'; known"),
        ("grep", {"pattern": "x", "output_mode": "all"}, "argument 'output_mode': Input should be"),
        ("run_terminal", {"command": "a\0b"}, "argument 'command': "),
        ("run_terminal", {"command": "x", "timeout": "9999"}, "argument 'timeout': "),
        (
            "write_file",
            {"path": "a", "content": "x" * (1 << 20)},
            "1048577 characters of arguments",
        ),
    ],
)
async def test_bad_arguments_are_answered_with_what_is_wrong(
    workspace: Workspace, name: str, arguments: dict[str, object], text: str
) -> None:
    outcome = await use(workspace, name, **arguments)
    assert text in outcome.content
    assert outcome.kind is ErrorKind.INVALID
