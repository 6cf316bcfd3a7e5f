"""Patches do what `git apply` does with them, all of it or nothing."""

import difflib
import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typing_extensions import override

from etude.agent.tool_calls import ParsedCall
from etude.agent.tools.base import ToolError, ToolOutcome
from etude.agent.tools.hunks import apply_hunks
from etude.agent.tools.unified_diff import parse_diff
from etude.agent.toolsets import run_calls, toolset
from etude.agent.workspace import ExecResult, MemoryWorkspace, PathFault, WorkspaceError

SOURCE = b"def add(a, b):\n    total = a + b\n    return total\n"
FIX = """--- a/shop/core.py
+++ b/shop/core.py
@@ -1,3 +1,3 @@
 def add(a, b):
-    total = a + b
+    total = b + a
     return total
"""
NEW = """diff --git a/new.txt b/new.txt
new file mode 100644
index 0000000..1234567
--- /dev/null
+++ b/new.txt
@@ -0,0 +1,2 @@
+one
+two
"""


async def no_shell(command: str, timeout_s: float) -> ExecResult:
    raise AssertionError(f"no command should run: {command} {timeout_s}")


def workspace(**files: bytes) -> MemoryWorkspace:
    return MemoryWorkspace({"shop/core.py": SOURCE, **files}, no_shell)


async def apply(made: MemoryWorkspace, patch: str) -> ToolOutcome:
    call = ParsedCall(name="apply_patch", arguments={"patch": patch})
    (outcome,) = await run_calls(toolset("Standard"), made, [call])
    return outcome


def ours(patch: str, before: bytes) -> bytes | None:
    try:
        (found,) = parse_diff(patch)
        return apply_hunks(found, before)
    except ToolError:
        return None


def gits(patch: str, before: bytes, folder: Path) -> bytes | None:
    (folder / "f").write_bytes(before)
    done = subprocess.run(
        ["git", "apply", "-"], cwd=folder, input=patch.encode(), capture_output=True, check=False
    )
    return (folder / "f").read_bytes() if done.returncode == 0 else None


texts = st.lists(st.sampled_from(["a", "b", "c", ""]), max_size=14).map(
    lambda lines: "".join(f"{line}\n" for line in lines)
)
ends = st.sampled_from(["", "", "end without a newline"])


def diffed(before: str, after: str, context: int) -> str:
    rows = difflib.unified_diff(
        before.splitlines(keepends=True), after.splitlines(keepends=True), "a/f", "b/f", n=context
    )
    return "".join(
        row if row.endswith("\n") else f"{row}\n\\ No newline at end of file\n" for row in rows
    )


@settings(max_examples=300, deadline=None)
@given(
    st.tuples(texts, ends).map("".join),
    st.tuples(texts, ends).map("".join),
    st.integers(0, 3),
    st.tuples(texts, texts),
)
def test_hunks_land_where_git_puts_them(
    before: str, after: str, context: int, around: tuple[str, str]
) -> None:
    patch = diffed(before, after, context)
    if not patch:
        return
    above, below = around
    with tempfile.TemporaryDirectory() as folder:
        # Git takes a last line without a newline for one with it, if it has seen context before.
        longer = above + before + below if before.endswith("\n") else above + before
        for present in (before, above + before, longer):
            data = present.encode()
            assert ours(patch, data) == gits(patch, data, Path(folder)), (patch, present)


@settings(max_examples=200, deadline=None)
@given(texts.filter(bool), texts, st.data())
def test_a_damaged_patch_is_refused_where_git_refuses_it(
    before: str, after: str, data: st.DataObject
) -> None:
    lines = diffed(before, after, 2).splitlines(keepends=True)
    if not lines:
        return
    at = data.draw(st.integers(2, len(lines) - 1))
    lines[at : at + 1] = data.draw(st.sampled_from([[], ["+x\n"], ["-a\n"], [" b\n"], ["junk\n"]]))
    with tempfile.TemporaryDirectory() as folder:
        raw = before.encode()
        assert ours("".join(lines), raw) == gits("".join(lines), raw, Path(folder)), lines


async def test_a_patch_changes_creates_and_deletes_files() -> None:
    made = workspace(old=b"gone\n")
    gone = "--- a/old\n+++ /dev/null\n@@ -1 +0,0 @@\n-gone\n"
    outcome = await apply(made, FIX + NEW + gone)
    assert outcome.content == (
        "Applied the patch:\nM shop/core.py (+1 -1)\nA new.txt (+2 -0)\nD old (+0 -1)"
    )
    assert made.files == {
        "shop/core.py": SOURCE.replace(b"a + b", b"b + a"),
        "new.txt": b"one\ntwo\n",
    }


async def test_a_patch_of_which_one_hunk_fails_changes_nothing() -> None:
    made = workspace(old=b"gone\n")
    wrong = "--- a/old\n+++ b/old\n@@ -1,2 +1,2 @@\n gone with\n-x\n+y\n"
    outcome = await apply(made, FIX + wrong)
    assert outcome.content == (
        "Error: hunk 1 of old (line 10 of the patch) does not match the file; nothing was changed;"
        " the nearest line is 1: gone"
    )
    assert made.files == workspace(old=b"gone\n").files


async def test_two_patches_of_one_file_are_applied_in_their_order() -> None:
    made = workspace()
    again = FIX.replace("b + a", "0").replace("a + b", "b + a")
    assert not (await apply(made, FIX + again)).is_error
    assert made.files["shop/core.py"] == SOURCE.replace(b"a + b", b"0")


async def test_line_ends_of_windows_stay() -> None:
    made = workspace()
    made.files["shop/core.py"] = SOURCE.replace(b"\n", b"\r\n")
    assert not (await apply(made, FIX)).is_error
    assert made.files["shop/core.py"] == SOURCE.replace(b"\n", b"\r\n").replace(b"a + b", b"b + a")


async def test_names_without_prefixes_and_a_missing_last_newline_are_taken() -> None:
    made = workspace()
    patch = FIX.replace("a/shop", "shop").replace("b/shop", "shop").rstrip("\n")
    assert not (await apply(made, f"Here is my patch:\n\n{patch}")).is_error


async def test_new_lints_of_a_patch_are_told() -> None:
    made = workspace()
    outcome = await apply(made, FIX.replace("b + a", "undefined"))
    assert "F821 Undefined name `undefined`" in outcome.content


@pytest.mark.parametrize(
    ("patch", "text"),
    [
        ("hello", "the patch names no file: begin with lines like --- a/PATH and +++ b/PATH"),
        ("@@ -1 +1 @@\n-a\n+b\n", "line 1 of the patch: a hunk without a file before it"),
        ("--- a/x\n+++ b/x\n", "line 1 of the patch: no hunk, like @@ -1,3 +1,4 @@, follows"),
        (FIX.replace("-1,3", "-1,4"), "line 3 of the patch: the hunk does not have as many lines"),
        (FIX.replace("a/shop", "a/../shop"), "a/../shop/core.py and b/shop/core.py"),
        (FIX.replace("shop/core", "../../x"), "../../x.py: is outside of the workspace"),
        (FIX.replace("core", "none"), "shop/none.py: no such file"),
        (NEW.replace("new.txt", "shop/core.py"), "shop/core.py exists already"),
        (NEW.replace("100644", "100755"), "line 2 of the patch: only files of mode 100644"),
        (NEW.replace("100644", "120000"), "line 2 of the patch: only files of mode 100644"),
        ("diff --git a/x b/y\nrename from x\nrename to y\n", "rename from x: not supported"),
        ("diff --git a/x b/x\nGIT binary patch\n", "GIT binary patch: not supported"),
        (
            "diff --git a/x b/x\nold mode 100644\nnew mode 100755\n",
            "old mode 100644: not supported",
        ),
    ],
)
async def test_what_cannot_be_done_is_said_with_its_place(patch: str, text: str) -> None:
    outcome = await apply(workspace(), patch)
    assert outcome.is_error
    # Two names are told as they are without their prefixes.
    assert text.replace("a/../", "../").replace("b/shop", "shop") in outcome.content


class Full(MemoryWorkspace):
    """A disk that takes no second file."""

    @override
    async def write(self, path: str, data: bytes) -> None:
        if path == "new.txt":
            raise WorkspaceError(PathFault.NO_SPACE, path)
        await super().write(path, data)


async def test_a_patch_that_cannot_be_written_is_taken_back() -> None:
    made = Full({"shop/core.py": SOURCE}, no_shell)
    assert (await apply(made, FIX + NEW)).content == "Error: new.txt: no space left"
    assert made.files == {"shop/core.py": SOURCE}


def test_an_empty_file_is_made_and_taken_away_without_a_hunk() -> None:
    header = "diff --git a/e e b/e e\n{} file mode 100644\nindex e69de29..0000000\n"
    (made,), (gone,) = (parse_diff(header.format(what)) for what in ("new", "deleted"))
    assert (made.path, made.is_new, gone.path, gone.is_deleted) == ("e e", True, "e e", True)


def test_names_that_git_quotes_are_read() -> None:
    patch = FIX.replace("a/shop/core.py", '"a/\\303\\251\\t.py"').replace(
        "b/shop/core.py", '"b/\\303\\251\\t.py"'
    )
    assert parse_diff(patch)[0].path == "é\t.py"
