"""Disks of VMs: sparse files that guests write to, over the read-only root of their image.

A VM's state is its memory and its disk of one moment, so a disk is copied while its VM is paused;
what the guest has not written yet is in its memory. Holes stay holes, and where the file system can
share blocks a copy takes none. The VMM gets an open file, no path; a guest can make nothing of its
disk but damage to itself. Nothing is flushed: a disk ends with its VM or its host.
"""

import asyncio
import contextlib
import errno
import fcntl
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

from blake3 import blake3

from etude.common.errors import crossing
from etude.envserver.drivers.vm.errors import IntegrityError, VmmError
from etude.envserver.drivers.vm.sparse_files import data_extents

DISK = "disk"
"""Name of the file in a VM's folder."""
PARTIAL = "disk.partial"
"""Name of a saved disk until its digest is known."""
DEFAULT_MIB = 10_240
"""Size unless a pool says another."""
DIGEST_BYTES = 32

_T = TypeVar("_T")
_SMALL_BYTES = 2 << 20
"""A copy of less takes less time than the switch to a thread."""
_MAKER = "mke2fs"
_MAKER_LIMIT_S = 60.0
# A journal and checksums would only cost writes: a disk is not mounted after a crash. The file is
# new, so nothing has to be cleared.
_OPTIONS = ("-O", "^has_journal,^metadata_csum,^resize_inode,uninit_bg", "-m", "0")
_EXTENDED = ("-E", "assume_storage_prezeroed=1,nodiscard,root_owner=0:0")
_FICLONE = 0x40049409
_PART_BYTES = 4 << 20
_BLOCK_BYTES = 1 << 16
"""Blocks of zeros count as holes: the digest is the same wherever a file system has put them."""
_ZEROS = bytes(_BLOCK_BYTES)
_LINKED = "disk.linked"
"""Name of a saved disk in another folder until it has its own."""
_KEPT = "disk-"
"""Start of the name of a saved disk, before its digest."""


def create(folder: Path, size_bytes: int) -> int:
    """Create the disk of a VM, without content, open for reading and writing."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    descriptor = os.open(folder / DISK, flags, 0o600)
    os.ftruncate(descriptor, size_bytes)
    return descriptor


def create_formatted(folder: Path, size_bytes: int) -> int:
    """Create the disk of a VM with an empty file system. Takes milliseconds.

    Raises:
        VmmError: mke2fs is missing or fails.
    """
    descriptor = create(folder, size_bytes)
    # Users' PATH lacks the folders where Debian keeps it.
    program = shutil.which(_MAKER) or shutil.which(_MAKER, path="/usr/sbin:/sbin") or _MAKER
    words = (program, "-q", "-F", "-t", "ext4", *_OPTIONS, *_EXTENDED, str(folder / DISK))
    try:
        done = subprocess.run(words, capture_output=True, check=False, timeout=_MAKER_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired) as cause:
        os.close(descriptor)
        raise VmmError(f"{_MAKER} (package e2fsprogs) cannot make a disk: {cause}") from cause
    if done.returncode:
        os.close(descriptor)
        raise VmmError(f"{_MAKER} failed: {done.stderr[-500:].decode(errors='replace').strip()}")
    return descriptor


def open_disk(path: Path) -> int:
    """Open a disk that no process writes to any more."""
    return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)


def fill(target: int, source: int) -> None:
    """Fill an empty disk with the content of another. Takes seconds a GiB: use a thread.

    Raises:
        VmmError: the disks differ in size, or the host's disk has no room.
    """
    size = os.fstat(source).st_size
    if os.fstat(target).st_size != size:
        raise VmmError(f"a disk of {size} bytes does not fit in one of another size")
    with crossing(VmmError, "a disk cannot be copied"):
        try:
            fcntl.ioctl(target, _FICLONE, source)
        except OSError:
            for start, end in data_extents(source):
                _copy(source, target, start, end)


async def run_copy(work: Callable[[], _T], num_bytes: int) -> _T:
    """Run a copy of this size: on a thread, unless it is small."""
    return work() if num_bytes < _SMALL_BYTES else await asyncio.to_thread(work)


def fill_in(folder: Path, source: int) -> None:
    """Fill the empty disk of the VM in a folder, which has not run yet."""
    with _open_file(folder / DISK, os.O_RDWR) as target:
        fill(target, source)


def copy(folder: Path, target: Path) -> int:
    """Copy the disk of a paused VM to another path; returns the copy, open."""
    with crossing(VmmError, "a disk cannot be copied"), _open_file(folder / DISK) as source:
        return copy_open(source, target)


def copy_open(source: int, target: Path) -> int:
    """Copy a disk to a path; returns the copy, open.

    Raises:
        VmmError: the host's disk has no room.
    """
    with crossing(VmmError, "a disk cannot be copied"):
        target.unlink(missing_ok=True)
        copied = os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(copied, os.fstat(source).st_size)
            fill(copied, source)
        except BaseException:
            os.close(copied)
            target.unlink(missing_ok=True)
            raise
    return copied


def read_small(folder: Path) -> "DiskContent | None":
    """Read the disk of a paused VM; None if it is not small, and has to be copied."""
    with crossing(VmmError, "a disk cannot be read"), _open_file(folder / DISK) as source:
        if used_bytes(source) >= _SMALL_BYTES:
            return None
        size = os.fstat(source).st_size
        parts = [
            (start, os.pread(source, end - start, start)) for start, end in data_extents(source)
        ]
    return DiskContent(size, parts)


def write(content: "DiskContent", target: Path) -> int:
    """Write what was read to a path; returns the file, open.

    Raises:
        VmmError: the host's disk has no room.
    """
    with crossing(VmmError, "a disk cannot be saved"), contextlib.ExitStack() as opened:
        target.unlink(missing_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        written = os.open(target, flags, 0o600)
        opened.callback(os.close, written)
        os.ftruncate(written, content.size_bytes)
        for offset, part in content.parts:
            _write_part(written, part, offset)
        opened.pop_all()
    return written


class DiskContent(NamedTuple):
    """Content of a small disk."""

    size_bytes: int
    parts: list[tuple[int, bytes]]
    """What is not a hole, with its offset."""


def link(folder: Path, target: Path) -> int:
    """Give the disk of a paused VM, which will not run again, another name; returns it, open."""
    with crossing(VmmError, "a disk cannot be saved"):
        target.unlink(missing_ok=True)
        os.link(folder / DISK, target)
        return open_disk(target)


def keep(folder: Path, descriptor: int) -> bytes:
    """Name the partial disk in a folder by its digest, which is returned. Call it on a thread."""
    found = digest(descriptor)
    (folder / PARTIAL).rename(kept_path(folder, found))
    return found


def kept_path(folder: Path, found: bytes) -> Path:
    """Path of a saved disk with this digest."""
    return folder / f"{_KEPT}{found.hex()}"


def open_kept(folder: Path, wanted: bytes) -> int:
    """Open the saved disk with this digest.

    Raises:
        IntegrityError: there is none.
    """
    try:
        return open_disk(kept_path(folder, wanted))
    except OSError as cause:
        raise IntegrityError(f"{kept_path(folder, wanted)}: {cause.strerror}") from cause


def link_kept(source: Path, target: Path, found: bytes) -> None:
    """Give a saved disk a second name in another folder.

    A file of that name there may be of a save that failed: its guest has gone on and writes to it.
    """
    linked = target / _LINKED
    linked.unlink(missing_ok=True)
    os.link(kept_path(source, found), linked)
    linked.replace(kept_path(target, found))
    linked.unlink(missing_ok=True)  # rename(2) leaves a name of the same file


def remove_kept(folder: Path, *, but: bytes = b"") -> None:
    """Remove saved disks, complete or not, except one."""
    for path in (*folder.glob(f"{_KEPT}*"), folder / PARTIAL):
        if path != kept_path(folder, but):
            path.unlink(missing_ok=True)


def digest(descriptor: int) -> bytes:
    """Compute the digest of a disk: the same for the same content. Takes half a second a GiB."""
    size = os.fstat(descriptor).st_size
    found, position = blake3(size.to_bytes(8, "big")), 0
    for start, end in data_extents(descriptor):
        # Whole blocks, each once: extents may share one.
        position = max(position, start - start % _BLOCK_BYTES)
        while position < end:
            wanted = min(_PART_BYTES, end - position + -end % _BLOCK_BYTES)
            part = memoryview(os.pread(descriptor, wanted, position))
            for at in range(0, len(part), _BLOCK_BYTES):
                block = part[at : at + _BLOCK_BYTES]
                if block != _ZEROS[: len(block)]:
                    found.update((position + at).to_bytes(8, "big"))
                    found.update(block)
            position += max(len(part), 1)
    return found.digest()


def check(descriptor: int, wanted: bytes) -> None:
    """Check that a disk has this digest.

    Raises:
        IntegrityError: it has another.
    """
    if digest(descriptor) != wanted:
        raise IntegrityError(f"the disk {wanted.hex()} is damaged")


def used_bytes(descriptor: int) -> int:
    """Bytes that a disk takes on the host."""
    return os.fstat(descriptor).st_blocks * 512


def used_in(folder: Path) -> int:
    """Bytes that the disk of the VM in a folder takes on the host."""
    with crossing(VmmError, "a VM has no disk"):
        return (folder / DISK).lstat().st_blocks * 512


def _write_part(target: int, part: bytes, offset: int) -> None:
    if os.pwrite(target, part, offset) != len(part):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _copy(source: int, target: int, start: int, end: int) -> None:
    while start < end:
        try:
            done = os.copy_file_range(source, target, end - start, start, start)
        except OSError as cause:
            if cause.errno not in {errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP}:
                raise
            part = os.pread(source, min(_PART_BYTES, end - start), start)
            done = os.pwrite(target, part, start)
        if not done:
            raise OSError(errno.EIO, "a disk became shorter while it was copied")
        start += done


@contextlib.contextmanager
def _open_file(path: Path, flags: int = os.O_RDONLY) -> Iterator[int]:
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
