"""Atomic writes: the old content or the new one, also where a write fails."""

from pathlib import Path

import pytest

from etude.common import atomic


def fail_half_way(path: Path) -> None:
    with atomic.replacing(path) as file:
        file.write(b"half of the new")
        raise RuntimeError("the writer failed")


@pytest.mark.parametrize("fsync", [False, True])
def test_a_write_replaces_the_content_and_leaves_nothing_else(
    tmp_path: Path, *, fsync: bool
) -> None:
    path = tmp_path / "state.json"
    atomic.write_text(path, "old", fsync=fsync)
    atomic.write_text(path, "new", fsync=fsync)
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_leaves_the_old_content(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    atomic.write_bytes(path, b"old")
    with pytest.raises(RuntimeError):
        fail_half_way(path)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_reader_never_sees_a_part(tmp_path: Path) -> None:
    path = tmp_path / "blocks"
    atomic.write_bytes(path, b"old")
    with atomic.replacing(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
        assert atomic.partial_path(path).read_bytes() == b"new"
    assert path.read_bytes() == b"new"


def test_a_new_file_gets_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "key"
    atomic.write_bytes(path, b"secret", mode=0o600)
    assert path.stat().st_mode & 0o777 == 0o600
