"""Dirty pages of a frozen clone, read from outside its process.

A clone maps the template's memory privately, so the kernel copies a page at its first write.
/proc/PID/pagemap tells copied pages from shared ones, without dirty tracking.
"""

import asyncio
import ctypes
import mmap
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from etude.envserver.drivers.vm.errors import VmmError

PAGE_BYTES = 4096
_PRESENT, _SWAPPED, _FILE = np.uint64(1 << 63), np.uint64(1 << 62), np.uint64(1 << 61)
_ENTRY_BYTES = 8
_VECTORS = 1000
"""Per call; the kernel takes 1024."""
_MAPPING = re.compile(
    r"(?P<start>[0-9a-f]{1,16})-(?P<end>[0-9a-f]{1,16}) rw-p (?P<offset>[0-9a-f]{1,16})"
    r" (?P<device>[0-9a-f]+:[0-9a-f]+) (?P<inode>\d{1,20}) "
)
_MAX_MAPS_BYTES = 1 << 22

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class GuestPages:
    """Some pages of the guest's memory."""

    numbers: tuple[int, ...]
    """Page numbers, ascending. [N]"""
    content: memoryview
    """Concatenated pages. [N x 4096 bytes]"""

    def __post_init__(self) -> None:
        if len(self.content) != len(self.numbers) * PAGE_BYTES:
            raise ValueError(f"{len(self.numbers)} pages, {len(self.content)} bytes")


class _Mapping(NamedTuple):
    """A mapped part of the memory, in bytes."""

    start: int
    end: int
    offset: int


class PageBuffer:
    """Reusable buffer for pages, populated ahead: page faults cost 3 ms a MiB on a nested host."""

    def __init__(self, size_bytes: int = 64 << 20) -> None:
        self._memory = _populated_memory(size_bytes)
        self.lock = asyncio.Lock()
        """Held from reading pages until they are written elsewhere."""

    def reserve(self, size_bytes: int) -> memoryview:
        """Reserve a number of bytes; the former content is lost."""
        if len(self._memory) < size_bytes:
            self._memory = _populated_memory(2 * size_bytes)
        return memoryview(self._memory)[:size_bytes]


def read_dirty_pages(pid: int, memory: int, buffer: PageBuffer) -> GuestPages:
    """Read every page of a frozen VM that differs from its template.

    Raises:
        VmmError: the VMM has ended, or has mapped its memory in another way.
    """
    about = os.fstat(memory)
    try:
        mappings = _mappings(pid, about)
        numbers = [_dirty_numbers(pid, mapping) for mapping in mappings]
        total = sum(len(each) for each in numbers)
        content = buffer.reserve(total * PAGE_BYTES)
        position = 0
        for mapping, found in zip(mappings, numbers, strict=True):
            size = len(found) * PAGE_BYTES
            _read(pid, _addresses(mapping, found), content[position : position + size])
            position += size
    except OSError as cause:
        raise VmmError(f"memory of VMM {pid} cannot be read: {cause}") from cause
    return GuestPages(numbers=tuple(np.concatenate(numbers).tolist()), content=content)


def _mappings(pid: int, about: os.stat_result) -> list[_Mapping]:
    """List the mapped parts of the memory, in order.

    Raises:
        VmmError: they do not cover it exactly.
    """
    device = f"{os.major(about.st_dev):02x}:{os.minor(about.st_dev):02x}"
    with Path(f"/proc/{pid}/maps").open("rb") as file:
        text = file.read(_MAX_MAPS_BYTES).decode("ascii", "replace")
    found = []
    for line in text.splitlines():
        match = _MAPPING.match(line)
        if match is not None and match["device"] == device and int(match["inode"]) == about.st_ino:
            start, end, offset = (int(match[name], 16) for name in ("start", "end", "offset"))
            found.append(_Mapping(start, end, offset))
    found.sort(key=lambda mapping: mapping.offset)
    expected = 0
    for mapping in found:
        if mapping.offset != expected:
            break
        expected += mapping.end - mapping.start
    if expected != about.st_size:
        raise VmmError(f"VMM {pid} has not mapped all of its memory exactly once")
    return found


def _dirty_numbers(pid: int, mapping: _Mapping) -> NDArray[np.int64]:
    """Find the numbers of a mapping's changed pages, counted from the start of the memory. [N].

    Raises:
        VmmError: the VMM has ended.
    """
    count = (mapping.end - mapping.start) // PAGE_BYTES
    descriptor = os.open(f"/proc/{pid}/pagemap", os.O_RDONLY)
    try:
        start = mapping.start // PAGE_BYTES * _ENTRY_BYTES
        data = os.pread(descriptor, count * _ENTRY_BYTES, start)
    finally:
        os.close(descriptor)
    if len(data) != count * _ENTRY_BYTES:
        raise VmmError(f"VMM {pid} has ended")
    entries = np.frombuffer(data, dtype=np.uint64)
    is_there = (entries & (_PRESENT | _SWAPPED)) != 0
    numbers: NDArray[np.int64] = np.flatnonzero(is_there & ((entries & _FILE) == 0))
    return numbers + mapping.offset // PAGE_BYTES


def _addresses(mapping: _Mapping, numbers: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Runs of neighbouring pages as the kernel's struct iovec. [R, 2]."""
    if not len(numbers):
        return np.empty((0, 2), dtype=np.uint64)
    breaks = np.flatnonzero(np.diff(numbers) != 1) + 1
    starts = numbers[np.concatenate(([0], breaks))]
    lengths = np.diff(np.concatenate(([0], breaks, [len(numbers)])))
    base = mapping.start - mapping.offset
    return np.stack([starts * PAGE_BYTES + base, lengths * PAGE_BYTES], axis=1).astype(np.uint64)


def _read(pid: int, runs: NDArray[np.uint64], content: memoryview) -> None:
    if not len(runs):
        return
    local = np.zeros((1, 2), dtype=np.uint64)
    address = np.frombuffer(content, dtype=np.uint8).ctypes.data
    for first in range(0, len(runs), _VECTORS):
        part = np.ascontiguousarray(runs[first : first + _VECTORS])
        wanted = int(part[:, 1].sum())
        local[0] = address, wanted
        here, there = (ctypes.c_void_p(each.ctypes.data) for each in (local, part))
        done = _libc.process_vm_readv(pid, here, 1, there, len(part), ctypes.c_ulong(0))
        if done != wanted:
            number = ctypes.get_errno() if done < 0 else 0
            raise OSError(number, os.strerror(number) if number else f"{done} of {wanted} bytes")
        address += wanted


_libc.process_vm_readv.restype = ctypes.c_ssize_t
_libc.process_vm_readv.argtypes = (
    *(ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong),
    *(ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong),
)


def _populated_memory(size_bytes: int) -> mmap.mmap:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
    return mmap.mmap(-1, max(size_bytes, PAGE_BYTES), flags=flags)
