"""Serialisation of a folder as one stream of bytes, and back.

An entry is the length of its head, the head in JSON, and for a file its blocks that are not all
zeros, each behind its offset and its length; a block of no length ends the file. Kept is what
copies keep. Only the host writes the folder meanwhile. The stream may come from anywhere: every
head is checked before anything is made of it. Both ways go name by name, as no call takes a path
longer than 4 KiB; what could not be unpacked is not packed. Python's tarfile writes no holes.
"""

import json
import os
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

from etude.agent.workspace.interface import MAX_DEPTH
from etude.common.errors import CorruptError
from etude.envserver.storage import copies
from etude.envserver.storage.folders import FolderLimits, TooLargeError

_LENGTH = struct.Struct(">I")
_BLOCK = struct.Struct(">QI")
_MAX_FOLDERS = MAX_DEPTH + 8
"""In each other: those of a workspace, in those that a snapshot has around it."""
_MAX_NAME_BYTES = 255
_MAX_LINK_BYTES = 4 << 10
_ESCAPED = 6
"""Characters of JSON that a byte may take."""
_MAX_HEAD_BYTES = _ESCAPED * ((_MAX_FOLDERS + 1) * (_MAX_NAME_BYTES + 1) + _MAX_LINK_BYTES) + 1024
_MAX_BLOCK_BYTES = 1 << 20
_PERMISSIONS = 0o777
_FAR = 1 << 63
"""No size and no time of a file, in nanoseconds, is so large."""
_KINDS = {stat.S_IFREG: "file", stat.S_IFDIR: "folder", stat.S_IFLNK: "link", stat.S_IFIFO: "pipe"}
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class ByteReader(Protocol):
    """Bytes in order."""

    def read(self, size: int, /) -> bytes:
        """Read this many bytes, fewer at the end only."""
        ...


def pack_folder(folder: Path, name: str) -> Iterator[bytes]:
    """Serialise an entry of a folder and everything below it; each folder comes before its content.

    Raises:
        TooLargeError: folders lie too deep in each other to be unpacked.
        CorruptError: an entry is not a file, folder, link or pipe.
        OSError: something cannot be read.
    """
    with copies.open_readable(folder, None, _FOLDER) as here:
        yield from _pack_entry(here, name, name)


def _pack_entry(parent: int, name: str, path: str) -> Iterator[bytes]:
    status = os.stat(name, dir_fd=parent, follow_symlinks=False)
    kind = _KINDS.get(stat.S_IFMT(status.st_mode))
    if kind is None:
        raise CorruptError(f"{path[-200:]!r} is not a file, folder, link or pipe")
    _check_depth(path)
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
    # Names are bytes: what is not UTF-8 travels as lone surrogates, which JSON escapes.
    text = json.dumps(head).encode()
    yield _LENGTH.pack(len(text)) + text
    if kind == "file":
        with copies.open_readable(name, parent, _READ) as there:
            for offset, block in copies.blocks(there, status.st_size):
                yield _BLOCK.pack(offset, len(block)) + block
        yield _BLOCK.pack(0, 0)
    if kind == "folder":
        with copies.open_readable(name, parent, _FOLDER) as there:
            with os.scandir(there) as entries:
                names = sorted(entry.name for entry in entries)
            for each in names:
                yield from _pack_entry(there, each, f"{path}/{each}")


def unpack_folder(stream: ByteReader, folder: Path, limits: FolderLimits) -> int:
    """Write the content of a stream into an empty folder; returns the bytes of content.

    Raises:
        CorruptError: it is not the output of pack_folder.
        TooLargeError: it holds more than the limits allow.
        OSError: something cannot be written.
    """
    with copies.open_readable(folder, None, _FOLDER) as here:
        unpacker = _Unpacker(stream, here, limits)
        try:
            while length := stream.read(_LENGTH.size):
                unpacker.unpack_entry(length)
            unpacker.finish()
        finally:
            unpacker.close()
    return unpacker.num_bytes


class _Open(NamedTuple):
    """A folder that may get more entries."""

    name: str
    """Whole path."""
    descriptor: int
    mode: int
    time_ns: int


@dataclass(slots=True)
class _Unpacker:
    stream: ByteReader
    folder: int
    """A descriptor."""
    limits: FolderLimits
    num_bytes: int = 0
    _entries: int = 0
    _folders: list[_Open] = field(default_factory=list)
    """The open folders, the innermost last."""

    def unpack_entry(self, length: bytes) -> None:
        self._entries += 1
        self._check()
        try:
            head = json.loads(self._read_exactly(self._head_length(length)))
            name, kind, mode = str(head["name"]), str(head["kind"]), int(head["mode"])
            parent, time_ns = self._parent(name), int(head["mtime_ns"])
            if mode & ~_PERMISSIONS or kind not in _KINDS.values() or abs(time_ns) >= _FAR:
                raise CorruptError(f"{name!r} has mode {mode}, kind {kind!r} and time {time_ns}")
            self._make(parent, _Open(name, -1, mode, time_ns), kind, head)
        except (ValueError, KeyError, TypeError, RecursionError, FileExistsError) as cause:
            raise CorruptError(f"entry {self._entries}: {cause}") from cause

    def finish(self) -> None:
        """Set the modes of the finished folders, the inner ones first."""
        while self._folders:
            self._finish_folder()

    def close(self) -> None:
        """Close all folders, finished or not."""
        while self._folders:
            os.close(self._folders.pop().descriptor)

    def _finish_folder(self) -> None:
        left = self._folders.pop()
        try:
            _apply_mode(left.descriptor, left)
        finally:
            os.close(left.descriptor)

    def _make(self, parent: int, made: _Open, kind: str, head: dict[str, object]) -> None:
        last = made.name.rpartition("/")[2]
        match kind:
            case "folder":
                os.mkdir(last, 0o700, dir_fd=parent)
                descriptor = os.open(last, _FOLDER, dir_fd=parent)
                self._folders.append(made._replace(descriptor=descriptor))
            case "link":
                os.symlink(str(head["leads_to"]), last, dir_fd=parent)
            case "pipe":
                os.mkfifo(last, dir_fd=parent)
                os.utime(last, ns=(made.time_ns, made.time_ns), dir_fd=parent)
                os.chmod(last, made.mode, dir_fd=parent)
            case _:
                size = int(str(head["size"]))
                if not 0 <= size < _FAR:
                    raise CorruptError(f"{made.name!r} has {size} bytes")
                descriptor = os.open(last, _CREATE, 0o600, dir_fd=parent)
                try:
                    self._fill(descriptor, made.name, size)
                    _apply_mode(descriptor, made)
                finally:
                    os.close(descriptor)

    def _fill(self, descriptor: int, name: str, size: int) -> None:
        """Write a file.

        Raises:
            CorruptError: its blocks are not inside it.
        """
        os.ftruncate(descriptor, size)
        while True:
            offset, length = _BLOCK.unpack(self._read_exactly(_BLOCK.size))
            if not length:
                return
            if length > _MAX_BLOCK_BYTES or offset + length > size:
                raise CorruptError(f"{name!r} has a block outside its {size} bytes")
            self.num_bytes += length
            self._check()
            copies.write_all(descriptor, self._read_exactly(length), offset)

    def _parent(self, name: str) -> int:
        """A descriptor of the folder that an entry belongs to.

        Raises:
            CorruptError: that folder is not open, or the name is invalid.
        """
        parent, slash, last = name.rpartition("/")
        _check_depth(name)
        is_name = last not in {"", ".", ".."} and len(os.fsencode(last)) <= _MAX_NAME_BYTES
        while is_name and self._folders and (not slash or self._folders[-1].name != parent):
            self._finish_folder()
        if not is_name or "\0" in name or bool(slash) != bool(self._folders):
            raise CorruptError(f"{name[:200]!r} is not a place in this folder")
        return self._folders[-1].descriptor if slash else self.folder

    def _head_length(self, packed: bytes) -> int:
        """Length of a head.

        Raises:
            CorruptError: it is too long, or the stream ends in the number.
        """
        if len(packed) != _LENGTH.size or _LENGTH.unpack(packed)[0] > _MAX_HEAD_BYTES:
            raise CorruptError(f"entry {self._entries} has no head")
        found: int = _LENGTH.unpack(packed)[0]
        return found

    def _read_exactly(self, size: int) -> bytes:
        """Read exactly this many bytes.

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


def _check_depth(path: str) -> None:
    """Check that a path can be packed and unpacked.

    Raises:
        TooLargeError: it lies in too many folders.
    """
    if path.count("/") > _MAX_FOLDERS:
        raise TooLargeError(f"it has folders more than {_MAX_FOLDERS} deep")


def _apply_mode(descriptor: int, wanted: _Open) -> None:
    os.utime(descriptor, ns=(wanted.time_ns, wanted.time_ns))
    os.fchmod(descriptor, wanted.mode)
