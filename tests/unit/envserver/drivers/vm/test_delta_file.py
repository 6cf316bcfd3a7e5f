"""Deltas in files: what somebody else touched is refused before a monitor could see it."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.envserver.drivers.vm import delta_file, disk, sealed_files
from etude.envserver.drivers.vm.errors import IntegrityError
from etude.envserver.drivers.vm.interface import VmDelta

KEY, TEMPLATE = b"k" * delta_file.KEY_BYTES, "ab" * 32
STREAM = bytes(range(256)) * 64


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("deltas") / "delta"
    stream = sealed_files.create_sealed("test", [STREAM])
    found = disk.create(path.parent, 1 << 20)
    (path.parent / disk.DISK).rename(path.parent / disk.PARTIAL)
    made = VmDelta(template=TEMPLATE, is_full=False, stream=stream, changed_bytes=8192, disk=found)
    delta_file.save(made, path, key=KEY)
    yield path
    made.close()


def test_a_delta_comes_back_as_it_was(saved: Path) -> None:
    found = delta_file.load(saved, key=KEY, template=TEMPLATE)
    with sealed_files.reopen(found.stream, found.offset) as source:
        assert os.read(source, 1 << 20) == STREAM
    assert (found.is_full, found.changed_bytes) == (False, 8192)
    found.close()
    kept = disk.kept_path(saved.parent, delta_file.disk_digest(saved))
    assert {path.name for path in saved.parent.iterdir()} == {"delta", kept.name}


@given(
    position=st.integers(0, delta_file.HEADER_BYTES + len(STREAM) - 1), change=st.integers(1, 255)
)
def test_any_other_byte_is_refused(saved: Path, position: int, change: int) -> None:
    data = bytearray(saved.read_bytes())
    data[position] ^= change
    garbled = saved.with_name("garbled")
    garbled.write_bytes(data)
    with pytest.raises(IntegrityError):
        delta_file.load(garbled, key=KEY, template=TEMPLATE)
    garbled.unlink()


@given(st.integers(0, delta_file.HEADER_BYTES + len(STREAM) - 1))
def test_any_shorter_file_is_refused(saved: Path, length: int) -> None:
    cut = saved.with_name("cut")
    cut.write_bytes(saved.read_bytes()[:length])
    with pytest.raises(IntegrityError):
        delta_file.load(cut, key=KEY, template=TEMPLATE)
    cut.unlink()


def test_a_longer_file_another_key_and_another_template_are_refused(saved: Path) -> None:
    longer = saved.with_name("longer")
    longer.write_bytes(saved.read_bytes() + b"\0")
    for path, key, template in (
        (longer, KEY, TEMPLATE),
        (saved, b"x" * delta_file.KEY_BYTES, TEMPLATE),
        (saved, KEY, "cd" * 32),
    ):
        with pytest.raises(IntegrityError):
            delta_file.load(path, key=key, template=template)
    longer.unlink()


def test_a_link_in_place_of_a_delta_is_not_followed(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(saved)
    with pytest.raises(OSError, match="symbolic"):
        delta_file.load(tmp_path / "link", key=KEY, template=TEMPLATE)


def test_a_file_that_has_proved_whole_is_not_read_again_before_it_is_written_to(
    saved: Path, tmp_path: Path
) -> None:
    path, proven = tmp_path / "delta", delta_file.VerifiedFiles()
    path.write_bytes(saved.read_bytes())
    disk.link_kept(saved.parent, tmp_path, delta_file.disk_digest(saved))
    delta_file.load(path, key=KEY, template=TEMPLATE, verified=proven).close()
    (tmp_path / "fork").hardlink_to(path)
    about = (tmp_path / "fork").stat()
    assert proven.is_verified(about, bytes.fromhex(delta_file.digest(path)))
    assert not proven.is_verified(about, bytes(32))

    damaged = bytearray(saved.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns + 1))
    with pytest.raises(IntegrityError):
        delta_file.load(path, key=KEY, template=TEMPLATE, verified=proven)
