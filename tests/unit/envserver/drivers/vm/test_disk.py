"""Disks of VMs: made empty, copied with their holes, named by what is on them."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.envserver.drivers.vm import delta_file, disk, sealed_files
from etude.envserver.drivers.vm.errors import IntegrityError, VmmError
from etude.envserver.drivers.vm.interface import VmDelta

SIZE, SMALL = 64 << 20, 1 << 20
KEY, TEMPLATE = b"k" * delta_file.KEY_BYTES, "ab" * 32


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    descriptor = disk.create(folder, SIZE)
    for offset, data in ((0, b"first"), (5 << 20, b"x" * 100_000), (SIZE - 3, b"end")):
        os.pwrite(descriptor, data, offset)
    os.close(descriptor)
    return folder


def content(descriptor: int) -> bytes:
    return os.pread(descriptor, SIZE, 0)


def test_a_copy_has_the_content_and_the_holes(source: Path, tmp_path: Path) -> None:
    copied = disk.copy(source, tmp_path / "copy")
    with (source / disk.DISK).open("rb") as file:
        assert content(copied) == content(file.fileno())
        assert disk.digest(copied) == disk.digest(file.fileno())
        assert disk.used_bytes(copied) <= disk.used_bytes(file.fileno()) + 65_536
    os.close(copied)


def test_a_second_copy_leaves_the_first_alone(source: Path, tmp_path: Path) -> None:
    first = disk.copy(source, tmp_path / "copy")
    before = disk.digest(first)
    (tmp_path / "vm").mkdir()
    os.close(disk.create(tmp_path / "vm", SIZE))
    os.close(disk.copy(tmp_path / "vm", tmp_path / "copy"))
    assert disk.digest(first) == before
    os.close(first)


@given(
    st.lists(
        st.tuples(st.integers(0, (SMALL - 65_536) // 4096), st.sampled_from([b"\0", b"a"])),
        max_size=6,
    )
)
def test_the_digest_goes_by_content_and_not_by_holes(writes: list[tuple[int, bytes]]) -> None:
    one, other = (sealed_files.create("disk", SMALL) for _ in range(2))
    for block, byte in writes:
        os.pwrite(one, byte * 65_536, block * 4096)
        if byte != b"\0":
            os.pwrite(other, byte * 65_536, block * 4096)
    is_equal = content(one) == content(other)
    assert (disk.digest(one) == disk.digest(other)) is is_equal
    for each in (one, other):
        os.close(each)


def test_a_new_disk_is_an_empty_file_system_that_takes_little(tmp_path: Path) -> None:
    descriptor = disk.create_formatted(tmp_path, 10 << 30)
    assert os.pread(descriptor, 2, 1024 + 0x38) == b"\x53\xef"  # ext4's magic number
    assert disk.used_bytes(descriptor) < 2 << 20
    os.close(descriptor)


def test_a_disk_too_small_for_a_file_system_says_so(tmp_path: Path) -> None:
    with pytest.raises(VmmError, match="mke2fs failed"):
        disk.create_formatted(tmp_path, 4096)


def test_a_missing_program_names_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "_MAKER", "mke2fs-that-is-missing")
    with pytest.raises(VmmError, match="package e2fsprogs"):
        disk.create_formatted(tmp_path, SIZE)


def test_disks_of_different_sizes_are_not_mixed(source: Path, tmp_path: Path) -> None:
    target = disk.create(tmp_path, SIZE // 2)
    found = disk.open_disk(source / disk.DISK)
    with pytest.raises(VmmError, match="does not fit"):
        disk.fill(target, found)
    for each in (target, found):
        os.close(each)


def saved_with_disk(source: Path, folder: Path) -> Path:
    stream = sealed_files.create_sealed("test", [b"state"])
    found = disk.copy(source, folder / disk.PARTIAL)
    made = VmDelta(template=TEMPLATE, is_full=False, stream=stream, changed_bytes=1, disk=found)
    delta_file.save(made, folder / "delta", key=KEY)
    made.close()
    return folder / "delta"


def test_a_delta_finds_its_disk_again(source: Path, tmp_path: Path) -> None:
    path = saved_with_disk(source, tmp_path)
    found = delta_file.load(path, key=KEY, template=TEMPLATE)
    assert disk.digest(found.disk) == delta_file.disk_digest(path)
    assert found.num_bytes > disk.used_bytes(found.disk)
    found.close()


def test_a_delta_whose_disk_is_missing_damaged_or_a_link_is_refused(
    source: Path, tmp_path: Path
) -> None:
    path = saved_with_disk(source, tmp_path)
    kept = disk.kept_path(tmp_path, delta_file.disk_digest(path))
    other = tmp_path / "other"
    kept.rename(other)
    with pytest.raises(IntegrityError):
        delta_file.load(path, key=KEY, template=TEMPLATE)
    kept.symlink_to(other)
    with pytest.raises(IntegrityError):
        delta_file.load(path, key=KEY, template=TEMPLATE)
    kept.unlink()
    other.rename(kept)
    delta_file.load(path, key=KEY, template=TEMPLATE).close()
    with kept.open("r+b") as file:
        file.seek(33 << 20)
        file.write(b"x")
    with pytest.raises(IntegrityError, match="damaged"):
        delta_file.load(path, key=KEY, template=TEMPLATE)


def test_disks_that_nothing_names_are_removed(source: Path, tmp_path: Path) -> None:
    path = saved_with_disk(source, tmp_path)
    wanted = delta_file.disk_digest(path)
    (tmp_path / f"disk-{'00' * 31}01").touch()
    (tmp_path / disk.PARTIAL).touch()
    disk.remove_kept(tmp_path, but=wanted)
    assert {each.name for each in tmp_path.iterdir()} == {"delta", f"disk-{wanted.hex()}"}
    disk.remove_kept(tmp_path)
    assert {each.name for each in tmp_path.iterdir()} == {"delta"}


def test_a_linked_disk_replaces_one_that_a_failed_save_left(tmp_path: Path) -> None:
    saved, lease = tmp_path / "snapshot", tmp_path / "lease"
    saved.mkdir()
    lease.mkdir()
    descriptor = disk.create(saved, SMALL)
    (saved / disk.DISK).rename(saved / disk.PARTIAL)
    found = disk.keep(saved, descriptor)
    os.close(descriptor)
    # The guest of the lease was not suspended, and writes to its disk.
    disk.kept_path(lease, found).write_bytes(b"later" * 1_000)
    for _ in range(2):
        disk.link_kept(saved, lease, found)
        linked = disk.open_kept(lease, found)
        disk.check(linked, found)
        os.close(linked)
    assert [path.name for path in lease.iterdir()] == [disk.kept_path(lease, found).name]
