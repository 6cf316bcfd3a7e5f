"""Paths that a git repository tracks, read from its index: gitformat-index(5).

The index may be hostile: one that is damaged tracks nothing.
"""

import struct
from collections.abc import Iterator
from pathlib import Path

_MAX_BYTES = 64 << 20
_HEADER = struct.Struct(">4sII")
_SIGNATURE = b"DIRC"
_FIXED = 62
"""Bytes of an entry before its path: ten numbers, a SHA-1 and flags."""
_MODE_AT = 24
_EXTENDED = 0x4000
_FILE = 0o100
"""Type of a regular file, in the upper bits of a mode."""
_MAX_SHIFT = 28


def tracked_paths(repository: Path) -> list[str]:
    """List the regular files that a folder's repository tracks; none if there is no repository."""
    index = repository / ".git" / "index"
    try:
        if index.parent.is_symlink() or index.is_symlink() or index.stat().st_size > _MAX_BYTES:
            return []
        data = index.read_bytes()
        return [path.decode() for path in _paths(data)]
    except (OSError, struct.error, IndexError, ValueError):
        return []


def _paths(data: bytes) -> Iterator[bytes]:
    """Iterate over the paths of regular files.

    Raises:
        ValueError: it is damaged, or of an unknown version.
    """
    signature, version, count = _HEADER.unpack_from(data)
    if signature != _SIGNATURE or not 2 <= version <= 4:
        raise ValueError(f"version {version} of an index")
    at, path = _HEADER.size, b""
    for _ in range(count):
        start = at
        (mode,) = struct.unpack_from(">I", data, start + _MODE_AT)
        (flags,) = struct.unpack_from(">H", data, start + _FIXED - 2)
        at = start + _FIXED + (2 if flags & _EXTENDED else 0)
        kept = b""
        if version == 4:
            removed, at = _number(data, at)
            kept = path[: len(path) - removed]
        end = data.index(0, at)
        path = kept + data[at:end]
        at = end + 1 if version == 4 else start + (end - start + 8) // 8 * 8
        if mode >> 9 == _FILE:
            yield path


def _number(data: bytes, at: int) -> tuple[int, int]:
    """Read a number of variable length, as offsets in packs are.

    Raises:
        ValueError: it is too long.
    """
    value = data[at] & 127
    shift = 0
    while data[at] & 128:
        shift += 7
        if shift > _MAX_SHIFT:
            raise ValueError("a number has no end")
        at += 1
        value = ((value + 1) << 7) | (data[at] & 127)
    return value, at + 1
