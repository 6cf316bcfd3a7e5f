"""Sealed memory files (memfd), immutable also for the VMM that reads them."""

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterable, Iterator

import numpy as np

_VECTORS = 1000
_PAGE_BYTES = 4096
PART_BYTES = 4 << 20
"""Size of the pieces in which a file is read."""
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


def create(name: str, size_bytes: int = 0) -> int:
    """Create a memory file that can be sealed, open for reading and writing."""
    descriptor = os.memfd_create(name, os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.ftruncate(descriptor, size_bytes)
    return descriptor


def seal(descriptor: int) -> None:
    """Make the file immutable; EBUSY while a writable mapping exists."""
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)


def is_sealed(descriptor: int) -> bool:
    """Tell whether the file is immutable."""
    return fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS == _SEALS


def create_sealed(name: str, pieces: Iterable[bytes | memoryview]) -> int:
    """Create a sealed file with this content."""
    descriptor = create(name)
    try:
        waiting: list[bytes | memoryview] = []
        for piece in pieces:
            waiting.append(piece)
            if len(waiting) == _VECTORS:
                _write(descriptor, waiting)
                waiting = []
        _write(descriptor, waiting)
        seal(descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


@contextlib.contextmanager
def reopen(descriptor: int, offset: int = 0) -> Iterator[int]:
    """Open the file again, read-only, at an offset in bytes."""
    found = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.lseek(found, offset, os.SEEK_SET)
        yield found
    finally:
        os.close(found)


def read_all(descriptor: int) -> bytes:
    """Read the whole file."""
    size = os.fstat(descriptor).st_size
    return os.pread(descriptor, size, 0)


def nonzero_pages(descriptor: int) -> Iterator[tuple[int, memoryview]]:
    """Iterate over the non-zero pages of a file, as the longest runs with their offsets.

    Runs end at multiples of PART_BYTES, wherever the file has holes.
    """
    for offset, part in _parts(descriptor):
        words = np.frombuffer(part, dtype=np.uint64).reshape(-1, _PAGE_BYTES // 8)
        is_zero = np.bitwise_or.reduce(words, axis=1) == 0
        edges = np.flatnonzero(np.diff(is_zero, prepend=True, append=True)) * _PAGE_BYTES
        for start, end in edges.reshape(-1, 2).tolist():
            yield offset + start, memoryview(part)[start:end]


def _parts(descriptor: int) -> Iterator[tuple[int, bytes]]:
    """Iterate over the aligned parts of a file that hold data.

    Raises:
        OSError: it cannot be read.
    """
    end = 0
    while True:
        try:
            start = os.lseek(descriptor, end, os.SEEK_DATA)
        except OSError as cause:
            if cause.errno != errno.ENXIO:
                raise
            return
        start -= start % PART_BYTES
        part = os.pread(descriptor, PART_BYTES, start)
        if len(part) % _PAGE_BYTES:
            raise OSError(errno.EINVAL, f"the file does not end with a page, at {start}")
        yield start, part
        end = start + len(part)


def _write(descriptor: int, pieces: list[bytes | memoryview]) -> None:
    """Write all pieces in one call.

    Raises:
        OSError: out of memory.
    """
    wanted = sum(len(piece) for piece in pieces)
    done = os.writev(descriptor, pieces)
    if done != wanted:
        raise OSError(errno.ENOSPC, f"{done} of {wanted} bytes were written")
