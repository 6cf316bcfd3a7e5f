"""Syntax errors of other languages, told by the checkers that the sandbox has."""

import asyncio
from asyncio.subprocess import PIPE, STDOUT
from pathlib import Path

import pytest

from etude.agent.tool_calls import ParsedCall
from etude.agent.toolsets import run_calls, toolset
from etude.agent.workspace import ExecResult, FolderWorkspace

BROKEN = "if true; then\n  echo yes\n"


def workspace(root: Path, *, path: str = "/usr/bin:/bin") -> FolderWorkspace:
    async def run(command: str, timeout_s: float) -> ExecResult:
        process = await asyncio.create_subprocess_exec(
            *("/bin/sh", "-c", command), cwd=root, env={"PATH": path}, stdout=PIPE, stderr=STDOUT
        )
        output, _ = await process.communicate()
        return ExecResult(output=output, exit_code=process.returncode or 0)

    return FolderWorkspace(root, run)


async def lints_after(made: FolderWorkspace, name: str, content: str) -> str:
    calls = [
        ParsedCall(name="write_file", arguments={"path": name, "content": content}),
        ParsedCall(name="read_lints", arguments={"paths": [name]}),
    ]
    return (await run_calls(toolset("Standard"), made, calls))[1].content


async def test_an_edit_that_breaks_a_script_is_told(tmp_path: Path) -> None:
    (tmp_path / "run it.sh").write_text("echo hello\n")
    told = await lints_after(workspace(tmp_path), "run it.sh", BROKEN)
    assert told.startswith("run it.sh: ")
    assert "end of file" in told.lower()
    assert "3" in told


async def test_what_was_broken_before_is_not_told_when_its_lines_move(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(BROKEN)
    told = await lints_after(workspace(tmp_path), "run.sh", f"# moved\n\n{BROKEN}")
    assert told == "No new lints."


async def test_a_new_script_that_is_right_says_nothing(tmp_path: Path) -> None:
    assert await lints_after(workspace(tmp_path), "new.sh", "echo hello\n") == "No new lints."


@pytest.mark.parametrize("name", ["a.go", "a.js", "a.rb", "a.php"])
async def test_a_language_without_a_checker_has_no_lints(tmp_path: Path, name: str) -> None:
    (tmp_path / "bin").mkdir()
    for program in ("sh", "base64"):
        (tmp_path / "bin" / program).symlink_to(f"/usr/bin/{program}")
    made = workspace(tmp_path, path=str(tmp_path / "bin"))
    assert await lints_after(made, name, "%%% no program at all\n") == "No new lints."


async def test_a_file_cannot_name_itself_out_of_the_check(tmp_path: Path) -> None:
    name = "-x'; touch owned; '.sh"
    told = await lints_after(workspace(tmp_path), name, BROKEN)
    assert told.startswith(name)
    assert not (tmp_path / "owned").exists()


async def test_a_large_file_is_left_out_with_a_word(tmp_path: Path) -> None:
    told = await lints_after(workspace(tmp_path), "a.sh", "echo\n" * 20_000)
    assert told == "Error: no lints: a.sh is larger than 64 KiB"
