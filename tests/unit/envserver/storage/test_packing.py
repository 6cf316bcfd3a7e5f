"""Folders as streams: what arrives is what was packed, and what nobody packed makes nothing."""

import contextlib
import io
import json
import os
import stat
import struct
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.environments.folder_trees import LIMITS, TREES, listing, make

from etude.agent.workspace.interface import MAX_DEPTH
from etude.common.errors import CorruptError
from etude.envserver.storage import copies, folders, packing
from etude.envserver.storage.folders import FolderLimits, TooLargeError


def packed(folder: Path, name: str = "saved") -> bytes:
    return b"".join(packing.pack_folder(folder, name))


def unpacked(data: bytes, folder: Path, limits: FolderLimits = LIMITS) -> int:
    return packing.unpack_folder(io.BytesIO(data), folder, limits)


def digest(folder: Path, scratch: Path) -> str:
    copied = copies.copy_folder(folder, scratch, limits=LIMITS, owner=folders.current_owner())
    return copied.digest


@settings(max_examples=40, deadline=None)
@given(tree=TREES)
def test_what_arrives_is_what_was_packed(tree: Mapping[str, tuple[str, bytes, int]]) -> None:
    with tempfile.TemporaryDirectory() as name:
        here, there = Path(name, "here"), Path(name, "there")
        (here / "saved").mkdir(parents=True)
        there.mkdir()
        make(here / "saved", tree)
        os.utime(here / "saved", ns=(5, 1_234_567_890_123_456_789))

        unpacked(packed(here), there)

        assert listing(there) == listing(here)
        assert (there / "saved").stat().st_mtime_ns == 1_234_567_890_123_456_789
        one, other = (digest(each / "saved", Path(name, each.name + "2")) for each in (here, there))
        assert one == other


def test_holes_and_names_that_are_no_text_arrive(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    (here / "saved").mkdir(parents=True)
    there.mkdir()
    odd = os.fsdecode(b"\xff\xfe")
    with (here / "saved" / odd).open("wb") as file:
        file.truncate(1 << 40)
        file.seek(1 << 39)
        file.write(b"middle")

    data = packed(here)
    assert len(data) < 1 << 20
    unpacked(data, there)

    arrived = there / "saved" / odd
    assert (arrived.stat().st_size, arrived.stat().st_blocks) < (1 << 41, 1 << 12)
    with arrived.open("rb") as file:
        file.seek(1 << 39)
        assert file.read(6) == b"middle"


@contextlib.contextmanager
def nested(folder: Path, name: bytes, depth: int) -> Iterator[int]:
    """A folder inside so many others, which no single path reaches."""
    with contextlib.ExitStack() as opened:
        there = os.open(folder, os.O_RDONLY)
        opened.callback(os.close, there)
        for _ in range(depth):
            os.mkdir(name, dir_fd=there)
            there = os.open(name, os.O_RDONLY, dir_fd=there)
            opened.callback(os.close, there)
        yield there


def test_the_longest_paths_and_links_of_a_workspace_arrive(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    (here / "saved" / "files").mkdir(parents=True)
    there.mkdir()
    with nested(here / "saved" / "files", b"\xfe" * 255, MAX_DEPTH) as inner:
        os.symlink(b"\xff" * 4095, b"\xfd" * 255, dir_fd=inner)
        os.close(os.open(b"\xfd" * 254, os.O_CREAT | os.O_WRONLY, 0o400, dir_fd=inner))

    unpacked(packed(here), there)

    one, other = (digest(each / "saved" / "files", each / "copy") for each in (here, there))
    assert one == other


def test_what_could_not_be_unpacked_is_not_packed(tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    with nested(tmp_path / "saved", b"d", MAX_DEPTH + 9):
        pass
    with pytest.raises(TooLargeError, match="72 deep"):
        packed(tmp_path)
    os.mknod(tmp_path / "socket", 0o600 | stat.S_IFSOCK)
    with pytest.raises(CorruptError, match="socket"):
        packed(tmp_path, "socket")


def entry(**head: object) -> bytes:
    text = json.dumps({"kind": "folder", "mode": 0o755, "mtime_ns": 0, **head}).encode()
    return struct.pack(">I", len(text)) + text


BLOCK = struct.Struct(">QI")
HOSTILE = {
    "a folder above": entry(name=".."),
    "an absolute path": entry(name="/tmp/etude-was-here"),
    "a path that climbs": entry(name="saved") + entry(name="saved/../../etude-was-here"),
    "a parent that nobody made": entry(name="saved/inner"),
    "a way through a link": entry(name="saved", kind="link", leads_to="/tmp")
    + entry(name="saved/etude-was-here"),
    "a folder that others came after": entry(name="a") + entry(name="b") + entry(name="a/c"),
    "a name of 256 bytes": entry(name="n" * 256),
    "the same name twice": entry(name="saved") * 2,
    "a link over a folder": entry(name="saved") + entry(name="saved", kind="link", leads_to="/"),
    "a device": entry(name="saved", kind="device"),
    "a mode with setuid": entry(name="saved", mode=0o4755),
    "a name with NUL": entry(name="sa\0ved"),
    "half a character": entry(name="\ud800"),
    "no name": entry(),
    "a name that is a list": entry(name=["saved"]) + b"\0",
    "a time that no file has": entry(name="saved", mtime_ns=1 << 80),
    "a size that no file has": entry(name="saved", kind="file", size=1 << 80),
    "a negative size": entry(name="saved", kind="file", size=-1),
    "a block behind the end": entry(name="saved", kind="file", size=4) + BLOCK.pack(2, 4) + b"abcd",
    "a block of 4 GiB": entry(name="saved", kind="file", size=1 << 40)
    + BLOCK.pack(0, (1 << 32) - 1),
    "a block that is cut off": entry(name="saved", kind="file", size=9) + BLOCK.pack(0, 9) + b"abc",
    "a file that does not end": entry(name="saved", kind="file", size=9),
    "a head of 4 GiB": b"\xff\xff\xff\xff",
    "a head that is no JSON": struct.pack(">I", 3) + b"{x}",
    "a head without end": struct.pack(">I", 20_000) + b"[" * 20_000,
    "half a length": b"\0\0",
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE.keys())
def test_what_nobody_packed_is_refused_and_nothing_is_made_elsewhere(
    data: bytes, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    target.mkdir()
    with pytest.raises(CorruptError):
        unpacked(data, target)
    assert [path.name for path in tmp_path.iterdir()] == ["target"]
    assert not Path("/tmp/etude-was-here").exists()


@settings(max_examples=200, deadline=None)
@given(cut=st.integers(0, 600), flip=st.integers(0, 600), bit=st.integers(0, 7))
def test_a_stream_that_was_cut_or_changed_makes_something_small_or_is_refused(
    cut: int, flip: int, bit: int
) -> None:
    with tempfile.TemporaryDirectory() as name:
        here, there = Path(name, "here"), Path(name, "there")
        (here / "saved" / "inner").mkdir(parents=True)
        (here / "saved" / "inner" / "file").write_bytes(b"content")
        (here / "saved" / "link").symlink_to("inner/file")
        there.mkdir()
        data = bytearray(packed(here)[: cut or None])
        data[flip % len(data)] ^= 1 << bit
        with contextlib.suppress(CorruptError, TooLargeError):
            unpacked(bytes(data), there, FolderLimits(max_files=10, max_bytes=1 << 20))
        assert sorted(path.name for path in Path(name).iterdir()) == ["here", "there"]


def test_more_than_the_limits_allow_is_refused(tmp_path: Path) -> None:
    here = tmp_path / "here"
    (here / "saved").mkdir(parents=True)
    for number in range(3):
        (here / "saved" / str(number)).write_bytes(b"x" * 100)
    data = packed(here)
    for place, limits in enumerate((FolderLimits(3, 1000), FolderLimits(10, 250))):
        target = tmp_path / str(place)
        target.mkdir()
        with pytest.raises(TooLargeError):
            unpacked(data, target, limits)
