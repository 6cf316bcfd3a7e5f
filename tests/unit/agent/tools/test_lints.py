"""Lints of edited files, of which only the new ones are shown. Runs the real ruff."""

from pathlib import Path

from etude.agent.tool_calls import ParsedCall
from etude.agent.tools import lints
from etude.agent.toolsets import run_calls, toolset
from etude.agent.workspace import ExecResult, FolderNotes, MemoryWorkspace

OLD = b"import os\n\n\ndef f():\n    return 1\n"


async def no_shell(command: str, timeout_s: float) -> ExecResult:
    raise AssertionError(f"no command should run: {command} {timeout_s}")


async def answers(workspace: MemoryWorkspace, *calls: ParsedCall) -> list[str]:
    return [outcome.content for outcome in await run_calls(toolset("Standard"), workspace, calls)]


def edit(old: str, new: str) -> ParsedCall:
    return ParsedCall(
        name="search_replace", arguments={"path": "a.py", "old_string": old, "new_string": new}
    )


READ = ParsedCall(name="read_lints", arguments={"paths": "a.py"})


async def test_an_edit_shows_what_it_brought_in_and_nothing_older() -> None:
    workspace = MemoryWorkspace({"a.py": OLD}, no_shell)
    (shown,) = await answers(workspace, edit("return 1", "return one"))
    assert shown.endswith("\nNew lints:\na.py:5:12: F821 Undefined name `one`")
    assert "F401" not in shown


async def test_old_lints_stay_old_when_their_lines_move() -> None:
    found = await lints.new_lints("a.py", OLD, b"# moved\n\n" + OLD)
    assert found == []


async def test_a_second_copy_of_an_old_lint_is_new() -> None:
    found = await lints.new_lints("a.py", b"x = a\n", b"x = a\nx = a\n")
    assert [lint.line for lint in found] == [2]


async def test_read_lints_compares_with_the_file_before_the_first_edit() -> None:
    workspace = MemoryWorkspace({"a.py": OLD}, no_shell)
    before, _, _, after = await answers(
        workspace, READ, edit("return 1", "return one"), edit("return one", "return two"), READ
    )
    assert before == "No new lints."
    assert after == "a.py:5:12: F821 Undefined name `two`"


async def test_the_file_before_the_first_edit_is_known_to_a_successor(tmp_path: Path) -> None:
    dead = MemoryWorkspace({"a.py": OLD}, no_shell, notes=FolderNotes(tmp_path))
    await answers(dead, edit("return 1", "return one"))
    successor = MemoryWorkspace(dict(dead.files), no_shell, notes=FolderNotes(tmp_path))
    assert await answers(successor, READ) == ["a.py:5:12: F821 Undefined name `one`"]


async def test_a_file_that_does_not_parse_says_where() -> None:
    workspace = MemoryWorkspace({}, no_shell)
    write = ParsedCall(name="write_file", arguments={"path": "a.py", "content": "def f(:\n"})
    (shown,) = await answers(workspace, write)
    assert "a.py:1:7: " in shown


async def test_other_languages_and_huge_files_have_no_lints() -> None:
    assert await lints.new_lints("a.txt", b"", b"x = a") == []
    workspace = MemoryWorkspace({}, no_shell)
    write = ParsedCall(name="write_file", arguments={"path": "a.py", "content": "x" * 100})
    await answers(workspace, write)
    workspace.files["a.py"] = b"x = a\n" * (1 << 18)
    assert await answers(workspace, READ) == ["Error: no lints: a.py is larger than 1 MiB"]


async def test_settings_in_the_workspace_do_not_reach_the_linter() -> None:
    source = b"# ruff: noqa\nx = a\n"
    assert await lints.diagnostics("a.py", source) == []
    found = await lints.diagnostics("-a.py", b"x = a\n")
    assert [lint.code for lint in found] == ["F821"]
