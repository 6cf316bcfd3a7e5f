"""Memory files of guests: full ones, sparse diffs, and their merges.

A diff has data where the guest wrote, zeros included, and holes elsewhere. Its file system must
have holes as small as a page, or unwritten memory would look like zeros.
"""

import fcntl
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from etude.common.errors import CorruptError
from etude.envserver.drivers.vm import sealed_files
from etude.envserver.drivers.vm.dirty_pages import PAGE_BYTES
from etude.envserver.drivers.vm.sparse_files import data_extents

_PART_BYTES = 4 << 20
_FICLONE = 0x40049409
_MAGIC = b"ETUDEFC1"
_HEAD = struct.Struct(">Q")
"""Size of the device state."""
_SEGMENT = struct.Struct(">QQ")
"""Offset in the memory, and size."""
_MAX_STATE_BYTES = 16 << 20


class MemoryPart(NamedTuple):
    """A part of a memory."""

    offset: int
    data: bytes


def has_small_holes(folder: Path) -> bool:
    """Tell whether files there can have holes of one page."""
    return os.statvfs(folder).f_bsize <= PAGE_BYTES


def data_parts(descriptor: int) -> Iterator[MemoryPart]:
    """Iterate over the data of a sparse file, in order.

    Raises:
        OSError: it cannot be read.
    """
    for start, end in data_extents(descriptor):
        for offset in range(start, end, _PART_BYTES):
            yield MemoryPart(offset, os.pread(descriptor, min(_PART_BYTES, end - offset), offset))


def merge(target: int, parts: Iterator[MemoryPart]) -> None:
    """Write parts over the content of a file."""
    for offset, data in parts:
        view, at = memoryview(data), offset
        while view:
            done = os.pwrite(target, view, at)
            view, at = view[done:], at + done


def copy_sparse(source: int, target: Path) -> None:
    """Make a read-only copy without the pages of zeros."""
    with target.open("xb") as file:
        file.truncate(os.fstat(source).st_size)
        for offset, data in sealed_files.nonzero_pages(source):
            file.seek(offset)
            file.write(data)
    target.chmod(0o444)


def copy_with_changes(source: Path, target: Path, parts: Iterator[MemoryPart]) -> None:
    """Make a read-only copy of a memory with changed parts, sharing blocks where the disk can."""
    with source.open("rb") as base, target.open("xb") as file:
        try:
            fcntl.ioctl(file.fileno(), _FICLONE, base.fileno())
        except OSError:
            file.truncate(os.fstat(base.fileno()).st_size)
            merge(file.fileno(), data_parts(base.fileno()))
        merge(file.fileno(), parts)
    target.chmod(0o444)


def encode_delta(state: bytes, changed: int | None) -> Iterator[bytes]:
    """Encode a device state and a sparse file of changes as one stream; None means no changes."""
    yield _MAGIC + _HEAD.pack(len(state))
    yield state
    if changed is not None:
        for offset, data in data_parts(changed):
            yield _SEGMENT.pack(offset, len(data))
            yield data


class DecodedDelta(NamedTuple):
    """A decoded stream."""

    state: bytes
    parts: Iterator[MemoryPart]


def decode_delta(stream: int, offset: int, *, memory_bytes: int) -> DecodedDelta:
    """Decode the device state and the changes of a stream.

    Raises:
        CorruptError: it is damaged; for parts raised while they are read.
    """
    head = os.pread(stream, len(_MAGIC) + _HEAD.size, offset)
    if len(head) != len(_MAGIC) + _HEAD.size or not head.startswith(_MAGIC):
        raise CorruptError("the delta is not one of this driver")
    (size,) = _HEAD.unpack(head[len(_MAGIC) :])
    if size > _MAX_STATE_BYTES:
        raise CorruptError(f"the delta's device state has {size} bytes")
    state = os.pread(stream, size, offset + len(head))
    if len(state) != size:
        raise CorruptError("the delta is cut off")
    return DecodedDelta(state, _parts(stream, offset + len(head) + size, memory_bytes))


def _parts(stream: int, at: int, memory_bytes: int) -> Iterator[MemoryPart]:
    while head := os.pread(stream, _SEGMENT.size, at):
        if len(head) != _SEGMENT.size:
            raise CorruptError("the delta is cut off")
        offset, size = _SEGMENT.unpack(head)
        if size > _PART_BYTES or offset + size > memory_bytes:
            raise CorruptError("the delta has a part outside the memory")
        data = os.pread(stream, size, at + _SEGMENT.size)
        if len(data) != size:
            raise CorruptError("the delta is cut off")
        yield MemoryPart(offset, data)
        at += _SEGMENT.size + size
