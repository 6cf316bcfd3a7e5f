"""Patches cut into files: git, which applies the parts one by one, is the oracle."""

import difflib
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.feedback.sessions import apply_patch

from etude.feedback.sessions.patches import join_patches, split_patch

_ENDS = ("b\r", "\x0c", "c\u2028d")
"""Of lines for Python, and not for git."""
_LINES = st.lists(
    st.sampled_from(["a", "", " ", "-- x", "++ y", "@@ z", "--- a/f", "diff --git", *_ENDS])
)
_FILES = st.dictionaries(st.sampled_from(["f", "d/g.py", "tests/h.py"]), _LINES, min_size=1)


def plain_patch(before: dict[str, list[str]], after: dict[str, list[str]]) -> str:
    """A patch as diff -u prints it."""
    return "".join(
        f"{line}\n"
        for path, lines in after.items()
        for line in difflib.unified_diff(
            before[path], lines, f"a/{path}", f"b/{path}", lineterm="", n=1
        )
    )


@settings(max_examples=40, deadline=None)
@given(before=_FILES, data=st.data())
def test_parts_applied_one_by_one_give_what_the_whole_gives(
    before: dict[str, list[str]], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    before = {path: ["first", *lines] for path, lines in before.items()}
    after = {path: ["first", *data.draw(_LINES)] for path in before}
    folder = tmp_path_factory.mktemp("work")
    for path, lines in before.items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_bytes("".join(f"{line}\n" for line in lines).encode())
    for part in split_patch(plain_patch(before, after)):
        assert part.path in before
        apply_patch(folder, part.text)
    for path, lines in after.items():
        assert (folder / path).read_bytes().decode() == "".join(f"{line}\n" for line in lines)


def test_gits_own_patches_are_cut_at_renames_modes_and_new_and_deleted_files(
    tmp_path: Path,
) -> None:
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    files = {"old.py": "x = 1\n" * 9, "gone.py": "y\n", "run.sh": "z\n", "a b.py": "w\n"}

    def run(*words: str) -> str:
        done = subprocess.run(
            [*git, *words], cwd=tmp_path, check=True, capture_output=True, text=True
        )
        return done.stdout

    run("init", "-q")
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    run("add", "-A")
    run("commit", "-qm", "base")
    (tmp_path / "old.py").rename(tmp_path / "new.py")
    (tmp_path / "gone.py").unlink()
    (tmp_path / "run.sh").chmod(0o755)
    (tmp_path / "a b.py").write_text("v")
    (tmp_path / "test_it.py").write_text("--- a/f\n+++ b/f\n")
    run("add", "-A")
    patch = run("diff", "--cached", "-M")
    parts = split_patch(f"Here it is:\n\n{patch}")
    assert [(each.path, each.is_test) for each in parts] == [
        ("a b.py", False),
        ("gone.py", False),
        ("new.py", False),
        ("run.sh", False),
        ("test_it.py", True),
    ]
    assert join_patches(parts) == patch
    wanted = run("ls-files", "-s")
    run("reset", "-q", "--hard")
    for part in parts:
        apply_patch(tmp_path, part.text)
    run("add", "-A")
    assert run("ls-files", "-s") == wanted


@pytest.mark.parametrize("text", ["", "def f():\n    return 1\n", "--\n+++ \n@@\n", "\0"])
def test_a_text_that_is_no_patch_has_no_path(text: str) -> None:
    assert not [each for each in split_patch(text) if each.path]
