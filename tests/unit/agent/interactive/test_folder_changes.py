"""Changes of a folder as a patch: `git apply` makes of the first state the second one."""

import asyncio
import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.agent.interactive.folder_changes import compare_folders
from etude.agent.interactive.user_files import UserFile, read_folder
from etude.common.errors import UserError

NAMES = st.sampled_from(["a.py", "sub/b.txt", "sub/deep/c", "größe.md", "with space", "-x"])
CONTENTS = st.one_of(
    st.sampled_from([b"", b"one\ntwo\n", b"no newline", b"crlf\r\n\r\n", bytes(range(256))]),
    st.binary(max_size=40),
)
FOLDERS = st.dictionaries(NAMES, st.builds(UserFile, CONTENTS, st.booleans()), max_size=4)


def write(folder: Path, files: Mapping[str, UserFile]) -> None:
    for path, file in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(file.content)
        (folder / path).chmod(0o755 if file.is_executable else 0o644)


def read(folder: Path) -> dict[str, UserFile]:
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return {
        str(path.relative_to(folder)): UserFile(path.read_bytes(), os.access(path, os.X_OK))
        for path in files
    }


@settings(max_examples=12, deadline=None)
@given(before=FOLDERS, after=FOLDERS)
def test_git_applies_what_changed(
    before: Mapping[str, UserFile], after: Mapping[str, UserFile]
) -> None:
    changes = compare_folders(before, after)
    changed = {path for path in {**before, **after} if before.get(path) != after.get(path)}
    assert {each.path for each in changes.files} == changed
    with tempfile.TemporaryDirectory() as scratch:
        write(Path(scratch), before)
        if changes.patch:
            words = ["git", "apply", "--whitespace=nowarn", "-"]
            subprocess.run(words, cwd=scratch, input=changes.patch, check=True)
        assert read(Path(scratch)) == after


def test_attributes_that_the_work_wrote_change_nothing_of_the_patch() -> None:
    text = UserFile(b"one\r\ntwo $Id$\r\n")
    rules = UserFile(b"* text=auto eol=lf ident filter=lfs\n")
    changes = compare_folders({}, {"a.txt": text, ".gitattributes": rules})
    assert b"+one\r\n+two $Id$\r\n" in changes.patch


def test_new_files_that_the_work_ignores_are_left_out_and_known_ones_are_not() -> None:
    rules = UserFile(b"*\n")
    after = {"cache/.gitignore": rules, "cache/x": UserFile(b"x"), "a": UserFile(b"2")}
    changes = compare_folders({"a": UserFile(b"1")}, after)
    assert [each.path for each in changes.files] == ["a"]
    kept = {"cache/.gitignore": rules, "cache/x": UserFile(b"1")}
    changes = compare_folders(kept, {**kept, "cache/x": UserFile(b"2")})
    assert [each.path for each in changes.files] == ["cache/x"]


@pytest.mark.parametrize(
    "path", [".git/hooks/pre-commit", "sub/.GIT/config", "git~1/config", "../up", "/etc/x", "a//b"]
)
def test_a_name_outside_of_the_folder_or_in_gits_own_is_refused(path: str) -> None:
    with pytest.raises(UserError, match="no patch may change"):
        compare_folders({}, {path: UserFile(b"x")})


def test_of_a_work_tree_those_files_are_read_that_git_does_not_ignore(tmp_path: Path) -> None:
    write(
        tmp_path, {".gitignore": UserFile(b"*.log\n"), "a.py": UserFile(b"x", is_executable=True)}
    )
    write(tmp_path, {"b.log": UserFile(b"x"), "sub/größe": UserFile(b"y")})
    (tmp_path / "link").symlink_to("/etc/passwd")
    everything = asyncio.run(read_folder(tmp_path))
    assert everything.files == read(tmp_path)
    assert everything.num_left_out == 0
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    listed = asyncio.run(read_folder(tmp_path))
    assert set(listed.files) == {".gitignore", "a.py", "sub/größe"}
    assert listed.files["a.py"] == UserFile(b"x", is_executable=True)
    assert listed.num_left_out == 1
    assert set(asyncio.run(read_folder(tmp_path / "sub")).files) == {"größe"}
