"""What the Firecracker driver decides without a machine: kernels, memories, users, ids."""

import bz2
import gzip
import lzma
import os
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.common.errors import CorruptError
from etude.envserver.drivers.vm.errors import VmmError
from etude.envserver.drivers.vm.firecracker import jail, memory_files
from etude.envserver.drivers.vm.firecracker.vmlinux import vmlinux
from etude.envserver.drivers.vm.firecracker.vmm_processes import FirecrackerFolders, vm_id_prefix
from etude.envserver.drivers.vm.jail import Jail
from etude.envserver.drivers.vm.uid_pool import UIDS, UidPool

PAGE = 4096
PAGES = 64
ELF = b"\x7fELF" + bytes(range(256)) * 40


def image(payload: bytes, unpacked: int) -> bytes:
    """A Linux image of boot protocol 2.15 with this payload behind one sector of setup."""
    data = bytearray(2 * 512)
    data[0x1F1] = 1
    data[0x202:0x206] = b"HdrS"
    payload += struct.pack("<I", unpacked)
    struct.pack_into("<H", data, 0x206, 0x20F)
    struct.pack_into("<II", data, 0x248, 0, len(payload))
    return bytes(data) + payload


def lz4(data: bytes) -> bytes:
    """One block that repeats nothing."""
    head = bytearray([0xF0])
    left = len(data) - 15
    while left >= 255:
        head.append(255)
        left -= 255
    block = bytes(head) + bytes([left]) + data
    return b"\x02\x21\x4c\x18" + struct.pack("<I", len(block)) + block


@pytest.mark.parametrize("way", [gzip.compress, lzma.compress, bz2.compress, lz4])
def test_a_kernel_is_unpacked_however_it_was_packed(way: object) -> None:
    assert callable(way)
    assert vmlinux(image(way(ELF), len(ELF))) == ELF
    assert vmlinux(ELF) == ELF


def test_what_a_kernel_repeats_is_unpacked() -> None:
    # "\x7fELF" as it is, then 20 bytes from 4 before; the last sequence has 5 bytes of its own.
    block = b"\x4f\x7fELF" + struct.pack("<H", 4) + b"\x01" + b"\x50end.."
    payload = b"\x02\x21\x4c\x18" + struct.pack("<I", len(block)) + block
    wanted = b"\x7fELF" * 6 + b"end.."
    assert vmlinux(image(payload, len(wanted))) == wanted


@given(cut=st.integers(0, 2 * 512 + 200))
def test_a_kernel_that_is_cut_off_is_damaged(cut: int) -> None:
    whole = image(lz4(ELF), len(ELF))
    with pytest.raises(CorruptError):
        vmlinux(whole[:cut])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        bytes(2000),
        image(b"unknown packing", 10),
        image(gzip.compress(b"no ELF"), 6),
        image(gzip.compress(ELF), len(ELF) + 1),
        image(lz4(ELF)[:-5], len(ELF)),
        image(b"\x02\x21\x4c\x18" + struct.pack("<I", 4) + b"\x0f\xff\xff\x00", 30),
    ],
)
def test_what_is_no_kernel_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptError):
        vmlinux(data)


Pages = dict[int, int]
pages = st.dictionaries(st.integers(0, PAGES - 1), st.integers(0, 255), max_size=12)


def sparse(path: Path, content: Pages) -> int:
    """A file in which only these pages were written, each full of one byte."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    os.ftruncate(descriptor, PAGES * PAGE)
    for number, byte in content.items():
        os.pwrite(descriptor, bytes([byte]) * PAGE, number * PAGE)
    return descriptor


def bytes_of(content: Pages) -> bytes:
    return b"".join(bytes([content.get(number, 0)]) * PAGE for number in range(PAGES))


@given(base=pages, changes=st.lists(pages, max_size=4))
def test_diffs_over_diffs_over_a_template_are_what_the_guest_had(
    base: Pages, changes: list[Pages], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("memory")
    os.close(sparse(folder / "base", base))
    changed = sparse(folder / "changed", {})
    for number, each in enumerate(changes):
        diff = sparse(folder / f"diff-{number}", each)
        memory_files.merge(changed, memory_files.data_parts(diff))
        os.close(diff)
    stream = sparse(folder / "stream", {})
    os.ftruncate(stream, 0)
    os.pwrite(stream, b"before" + b"".join(memory_files.encode_delta(b"devices", changed)), 0)

    found = memory_files.decode_delta(stream, len(b"before"), memory_bytes=PAGES * PAGE)
    memory_files.copy_with_changes(folder / "base", folder / "clone", found.parts)

    assert found.state == b"devices"
    wanted = base
    for each in changes:
        wanted = {**wanted, **each}
    assert (folder / "clone").read_bytes() == bytes_of(wanted)
    assert (folder / "base").read_bytes() == bytes_of(base)
    os.close(changed)
    os.close(stream)


def test_a_copy_without_zeros_is_the_same_memory(tmp_path: Path) -> None:
    full = sparse(tmp_path / "full", {number: number % 3 for number in range(PAGES)})
    memory_files.copy_sparse(full, tmp_path / "copy")
    os.close(full)
    assert (tmp_path / "copy").read_bytes() == (tmp_path / "full").read_bytes()
    assert (tmp_path / "copy").stat().st_mode & 0o777 == 0o444


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"X" + data[1:],
        lambda data: data[:10],
        lambda data: data[:-1],
        lambda data: data[:23] + struct.pack(">QQ", PAGES * PAGE, PAGE) + data[39:],
        lambda data: data[:23] + struct.pack(">QQ", 0, 1 << 40) + data[39:],
        lambda data: data[:8] + struct.pack(">Q", 1 << 40) + data[16:],
    ],
)
def test_a_damaged_delta_is_no_delta(damage: object, tmp_path: Path) -> None:
    assert callable(damage)
    changed = sparse(tmp_path / "changed", {3: 7})
    whole = b"".join(memory_files.encode_delta(b"devices", changed))
    assert len(whole) == 8 + 8 + 7 + 16 + PAGE
    stream = os.open(tmp_path / "stream", os.O_RDWR | os.O_CREAT)
    os.write(stream, damage(whole))
    with pytest.raises(CorruptError):
        list(memory_files.decode_delta(stream, 0, memory_bytes=PAGES * PAGE).parts)
    os.close(stream)
    os.close(changed)


def test_no_two_vms_have_the_same_user_and_a_number_rests() -> None:
    users = UidPool()
    users.reserve([UIDS[0]])
    first, second = users.take(), users.take()
    assert len({UIDS[0], first, second}) == 3
    users.give(first)
    assert users.take() not in {UIDS[0], first, second}


def test_a_user_that_forked_vms_share_is_free_when_the_last_of_them_has_ended() -> None:
    first = Jail(users=UidPool()).take_user()
    first.share_user()
    first.give_user()
    assert first.uid not in {first.take_user().uid for _ in UIDS[1:]}

    first.give_user()
    assert first.take_user().uid == first.uid


def test_users_end() -> None:
    users = UidPool()
    users.reserve(UIDS)
    with pytest.raises(VmmError, match="in use"):
        users.take()
    users.give(UIDS[5])
    assert users.take() == UIDS[5]


def test_hosts_do_not_know_each_others_vms(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    assert vm_id_prefix(tmp_path / "a") != vm_id_prefix(tmp_path / "b")
    assert vm_id_prefix(tmp_path / "a").isalnum()
    assert FirecrackerFolders(scratch=tmp_path / "a").find_processes() == {}


def test_control_groups_of_this_host_alone_are_removed(tmp_path: Path) -> None:
    for name in ("mine-1", "mine-2/busy", "other-1"):
        (tmp_path / "firecracker" / name).mkdir(parents=True)
    jail.remove_cgroups("firecracker", "mine", root=tmp_path)
    left = sorted(path.name for path in (tmp_path / "firecracker").iterdir())
    assert left == ["mine-2", "other-1"]
    jail.remove_cgroups("none", "mine", root=tmp_path)
