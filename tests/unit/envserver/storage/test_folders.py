"""Workspaces on disk, in the hands of somebody hostile."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from etude.envserver.storage import folders
from etude.envserver.storage.folders import FolderLimits, TooLargeError, current_owner
from etude.envserver.storage.trees import File

TREE = {"a.txt": File(b"1"), "bin/run": File(b"2", executable=True), "d/e/f.py": File(b"")}


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    folder = tmp_path / "workspace"
    folders.write_tree(folder, TREE, current_owner())
    return folder


def test_what_is_written_is_read_back(workspace: Path) -> None:
    assert folders.read_tree(workspace, folders.SMALL) == (TREE, True)


def test_a_workspace_is_made_once(workspace: Path) -> None:
    with pytest.raises(FileExistsError):
        folders.write_tree(workspace, TREE, current_owner())


def test_links_and_devices_are_left_out_and_told(workspace: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (workspace / "link").symlink_to(tmp_path / "secret")
    (workspace / "folder").symlink_to(tmp_path)
    os.mkfifo(workspace / "pipe")

    found = folders.read_tree(workspace, folders.SMALL)

    assert found == (TREE, False)


def test_an_empty_folder_is_told(workspace: Path) -> None:
    (workspace / "empty").mkdir()

    assert not folders.read_tree(workspace, folders.SMALL).is_plain


def test_the_workspace_itself_may_not_be_a_link(workspace: Path, tmp_path: Path) -> None:
    (tmp_path / "other").symlink_to(workspace)

    with pytest.raises(OSError, match="other"):
        folders.read_tree(tmp_path / "other", folders.SMALL)


@pytest.mark.parametrize("limits", [FolderLimits(4, 100), FolderLimits(100, 1)])
def test_a_workspace_beyond_the_limits_is_not_read(workspace: Path, limits: FolderLimits) -> None:
    with pytest.raises(TooLargeError):
        folders.read_tree(workspace, limits)


@pytest.fixture
def deep(workspace: Path) -> Iterator[Path]:
    """A workspace whose folders nest beyond any stack and any path."""
    at = os.open(workspace, os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("a" * 8, dir_fd=at)
        inner = os.open("a" * 8, os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = inner
    os.close(os.open("file", os.O_WRONLY | os.O_CREAT, dir_fd=at))
    os.fchmod(at, 0)
    os.close(at)
    yield workspace
    # pytest cannot remove it either.
    folders.remove_folder(workspace)


def test_folders_without_end_are_too_large_to_read(deep: Path) -> None:
    with pytest.raises(TooLargeError, match="deep"):
        folders.read_tree(deep, folders.DIFF)


def test_folders_without_end_go(deep: Path) -> None:
    folders.remove_folder(deep)

    assert not deep.exists()


def test_a_folder_goes_whatever_its_modes_and_without_what_it_links_to(
    workspace: Path, tmp_path: Path
) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").touch()
    (workspace / "link").symlink_to(kept)
    (workspace / "d/e").chmod(0)
    (workspace / "d").chmod(0)

    folders.remove_folder(workspace)

    assert not workspace.exists()
    assert (kept / "file").exists()
    folders.remove_folder(workspace)
