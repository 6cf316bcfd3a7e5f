"""A folder of the node's own as one stream of bytes, and back.

An entry is the length of its head, the head in JSON, and for a file its blocks that are not all
zeros, each behind its offset and its length; a block of no length ends the file. Kept is what
copies keep. Nobody but the node writes the folder meanwhile. The stream may come from anywhere:
what it says is checked before anything is made of it.
"""

import json
import os
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from etude.common.errors import CorruptError
from etude.envserver import copies
from etude.envserver.folders import Limits, TooLargeError

_LENGTH = struct.Struct(">I")
_BLOCK = struct.Struct(">QI")
_MAX_HEAD_BYTES = 32 << 10
"""A path and what a link leads to, 4 KiB each, every byte of them escaped."""
_MAX_BLOCK_BYTES = 1 << 20
_PERMISSIONS = 0o777
_FAR = 1 << 63
"""No size and no time of a file, in nanoseconds, is so large."""
_KINDS = {stat.S_IFREG: "file", stat.S_IFDIR: "folder", stat.S_IFLNK: "link", stat.S_IFIFO: "pipe"}
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class Reader(Protocol):
    """Bytes in order."""

    def read(self, size: int, /) -> bytes:
        """So many, fewer at the end only."""
        ...


def pack(folder: Path, name: str) -> Iterator[bytes]:
    """An entry of a folder, and everything below it; each folder comes before what is in it.

    Raises:
        OSError: something cannot be read.
    """
    with copies.readable(folder, None, _FOLDER) as here:
        yield from _packed(here, name, name)


def _packed(parent: int, name: str, path: str) -> Iterator[bytes]:
    status = os.stat(name, dir_fd=parent, follow_symlinks=False)
    kind = _KINDS[stat.S_IFMT(status.st_mode)]
    head: dict[str, object] = {
        "name": path,
        "kind": kind,
        "mode": status.st_mode & _PERMISSIONS,
        "mtime_ns": status.st_mtime_ns,
    }
    if kind == "link":
        head["leads_to"] = os.readlink(name, dir_fd=parent)
    if kind == "file":
        head["size"] = status.st_size
    # Names are bytes: what is no UTF-8 travels as lone surrogates, which JSON escapes.
    text = json.dumps(head).encode()
    yield _LENGTH.pack(len(text)) + text
    if kind == "file":
        with copies.readable(name, parent, _READ) as there:
            for offset, block in copies.blocks(there, status.st_size):
                yield _BLOCK.pack(offset, len(block)) + block
        yield _BLOCK.pack(0, 0)
    if kind == "folder":
        with copies.readable(name, parent, _FOLDER) as there:
            with os.scandir(there) as entries:
                names = sorted(entry.name for entry in entries)
            for each in names:
                yield from _packed(there, each, f"{path}/{each}")


def unpack(stream: Reader, folder: Path, limits: Limits) -> int:
    """Make what a stream says in an empty folder; returns the bytes of content.

    Raises:
        CorruptError: it says what nobody packed.
        TooLargeError: it holds more than the limits allow.
        OSError: something cannot be written.
    """
    unpacker = _Unpacker(stream, folder, limits)
    while length := stream.read(_LENGTH.size):
        unpacker.entry(length)
    unpacker.finish()
    return unpacker.num_bytes


@dataclass(slots=True)
class _Unpacker:
    stream: Reader
    folder: Path
    limits: Limits
    num_bytes: int = 0
    _entries: int = 0
    _folders: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Mode and time of each folder, which are given when nothing comes into it any more."""

    def entry(self, length: bytes) -> None:
        self._entries += 1
        self._check()
        try:
            head = json.loads(self._exactly(self._length(length)))
            name, kind, mode = str(head["name"]), str(head["kind"]), int(head["mode"])
            path, time_ns = self._place(name), int(head["mtime_ns"])
            if mode & ~_PERMISSIONS or kind not in _KINDS.values() or abs(time_ns) >= _FAR:
                raise CorruptError(f"{name!r} has mode {mode}, kind {kind!r} and time {time_ns}")
            self._make(path, name, kind, head)
        except (ValueError, KeyError, TypeError, RecursionError, FileExistsError) as cause:
            raise CorruptError(f"entry {self._entries}: {cause}") from cause
        if kind == "folder":
            self._folders[name] = (mode, time_ns)
        elif kind != "link":
            _dress(path, mode, time_ns)

    def finish(self) -> None:
        """Give folders their modes, the inner ones first."""
        for name, (mode, time_ns) in reversed(self._folders.items()):
            _dress(self.folder / name, mode, time_ns)

    def _make(self, path: Path, name: str, kind: str, head: dict[str, object]) -> None:
        match kind:
            case "folder":
                path.mkdir(mode=0o700)
            case "link":
                path.symlink_to(str(head["leads_to"]))
            case "pipe":
                os.mkfifo(path)
            case _:
                self._file(path, name, int(str(head["size"])))

    def _file(self, path: Path, name: str, size: int) -> None:
        """Write a file.

        Raises:
            CorruptError: its blocks are not inside it.
        """
        if not 0 <= size < _FAR:
            raise CorruptError(f"{name!r} has {size} bytes")
        descriptor = os.open(path, _CREATE, 0o600)
        try:
            os.ftruncate(descriptor, size)
            while True:
                offset, length = _BLOCK.unpack(self._exactly(_BLOCK.size))
                if not length:
                    return
                if length > _MAX_BLOCK_BYTES or offset + length > size:
                    raise CorruptError(f"{name!r} has a block outside its {size} bytes")
                self.num_bytes += length
                self._check()
                copies.write_all(descriptor, self._exactly(length), offset)
        finally:
            os.close(descriptor)

    def _place(self, name: str) -> Path:
        """Where an entry belongs.

        Raises:
            CorruptError: not into a folder that this stream made.
        """
        parent, slash, last = name.rpartition("/")
        if last in {"", ".", ".."} or "\0" in name or (slash and parent not in self._folders):
            raise CorruptError(f"{name[:200]!r} is no place in this folder")
        return self.folder / name

    def _length(self, packed: bytes) -> int:
        """How long a head is.

        Raises:
            CorruptError: too long, or the stream ends in the number.
        """
        if len(packed) != _LENGTH.size or _LENGTH.unpack(packed)[0] > _MAX_HEAD_BYTES:
            raise CorruptError(f"entry {self._entries} has no head")
        found: int = _LENGTH.unpack(packed)[0]
        return found

    def _exactly(self, size: int) -> bytes:
        """So many bytes.

        Raises:
            CorruptError: there are fewer.
        """
        data = self.stream.read(size)
        if len(data) != size:
            raise CorruptError(f"the stream ends in entry {self._entries}")
        return data

    def _check(self) -> None:
        if self._entries > self.limits.max_files or self.num_bytes > self.limits.max_bytes:
            raise TooLargeError(
                f"it holds more than {self.limits.max_files} entries"
                f" or {self.limits.max_bytes} bytes"
            )


def _dress(path: Path, mode: int, time_ns: int) -> None:
    os.utime(path, ns=(time_ns, time_ns), follow_symlinks=False)
    path.chmod(mode)
