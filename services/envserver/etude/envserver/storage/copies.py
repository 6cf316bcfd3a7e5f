"""Copies of folders that a hostile process may have filled, with a digest of what was copied.

Kept: regular files with their holes, folders, links as links, pipes; modes of owner, group and
others; times of last change. Left out: sockets and devices, owners, setuid and sticky bits. Names
that share a file get a copy each. Everything in the source is opened without following links. If
it changes meanwhile the copy is of several moments; entries that vanish before they are opened are
left out, as tar does. The digest is the copy's.
"""

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from blake3 import blake3

from etude.agent.workspace.interface import MAX_DEPTH
from etude.envserver.storage.folders import FolderLimits, Owner, TooLargeError, current_owner

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_HANDLE = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_FICLONE = 0x40049409
_BLOCK_BYTES = 1 << 16
"""Blocks of zeros become holes: the digest is the same wherever a file system has put them."""
_ZEROS = bytes(_BLOCK_BYTES)
_PERMISSIONS = 0o777
_KEPT = frozenset({stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK, stat.S_IFIFO})
_CHANGED = frozenset({errno.ENOENT, errno.ELOOP, errno.ENOTDIR, errno.EINVAL, errno.ENXIO})
"""Errors of a name that is gone, or has become another kind of entry."""
_LOOKS = 3
"""Attempts at a name that keeps changing; then it is left out."""


class CopiedFolder(NamedTuple):
    """Size and digest of a copy."""

    num_bytes: int
    """Of content; holes and zeros are free."""
    digest: str
    """The same for the same names, kinds, modes and content."""


def copy_folder(source: Path, target: Path, *, limits: FolderLimits, owner: Owner) -> CopiedFolder:
    """Copy a folder into a new one.

    Args:
        source: a folder.
        target: must not exist; what is there after an error is the caller's to remove.
        limits: of entries and of content.
        owner: of everything in the copy.

    Raises:
        TooLargeError: there is more than the limits allow.
        OSError: the source cannot be read, or the target cannot be written.
    """
    copier = _Copier(limits, owner)
    target.mkdir(mode=0o700)
    here = os.open(target, _FOLDER)
    try:
        with open_readable(source, None, _FOLDER) as there:
            copier.folder(there, here, "")
        copier.finish(here, source.lstat())
    finally:
        os.close(here)
    return CopiedFolder(copier.num_bytes, copier.digest.hexdigest())


class _ChangedError(Exception):
    """A name has changed its kind since it was examined; nothing of it was copied."""


class _Copier:
    def __init__(self, limits: FolderLimits, owner: Owner) -> None:
        self.num_bytes = 0
        self.digest = blake3()
        self._limits = limits
        self._owner = owner if owner != current_owner() else None
        self._entries = 0
        self._can_clone = True

    def folder(self, source: int, target: int, path: str) -> None:
        """Copy everything in a folder.

        Raises:
            TooLargeError: the folder is too deep.
        """
        if path.count("/") > MAX_DEPTH:
            raise TooLargeError(f"the workspace has folders more than {MAX_DEPTH} deep")
        for name in sorted(self._names(source)):
            for _ in range(_LOOKS):
                with contextlib.suppress(_ChangedError):
                    self._entry(source, target, name, path)
                    break

    def _names(self, source: int) -> Iterator[str]:
        with os.scandir(source) as entries:
            for entry in entries:
                self._entries += 1
                self._check()
                yield entry.name

    def finish(self, target: int, status: os.stat_result) -> None:
        """Set owner, mode and time of a file or folder."""
        if self._owner is not None:
            os.fchown(target, *self._owner)
        os.fchmod(target, status.st_mode & _PERMISSIONS)
        os.utime(target, ns=(status.st_mtime_ns, status.st_mtime_ns))

    def _entry(self, source: int, target: int, name: str, path: str) -> None:
        with _detect_change():
            status = os.stat(name, dir_fd=source, follow_symlinks=False)
        kind = stat.S_IFMT(status.st_mode)
        if kind not in _KEPT:
            return
        # Nothing is hashed or made of a name before its content is open.
        said = os.fsencode(path + name), b"%o %o" % (kind, status.st_mode & _PERMISSIONS)
        with contextlib.ExitStack() as opened:
            match kind:
                case stat.S_IFREG:
                    there = opened.enter_context(_open_source(name, source, _READ))
                    self._hash(*said)
                    self._file(there, target, name, status)
                case stat.S_IFDIR:
                    there = opened.enter_context(_open_source(name, source, _FOLDER))
                    self._hash(*said)
                    self._inside(there, target, name, status, f"{path}{name}/")
                case stat.S_IFLNK:
                    with _detect_change():
                        leads_to = os.readlink(name, dir_fd=source)
                    self._hash(*said, os.fsencode(leads_to))
                    os.symlink(leads_to, name, dir_fd=target)
                    self._set_owner(target, name)
                case _:
                    self._hash(*said)
                    self._pipe(target, name, status)

    def _inside(
        self, there: int, target: int, name: str, status: os.stat_result, path: str
    ) -> None:
        os.mkdir(name, 0o700, dir_fd=target)
        here = os.open(name, _FOLDER, dir_fd=target)
        try:
            self.folder(there, here, path)
            self.finish(here, status)
        finally:
            os.close(here)

    def _pipe(self, target: int, name: str, status: os.stat_result) -> None:
        os.mkfifo(name, dir_fd=target)
        self._set_owner(target, name)
        handle = os.open(name, _HANDLE, dir_fd=target)
        try:
            os.chmod(_proc_path(handle), status.st_mode & _PERMISSIONS)  # noqa: PTH101 - a descriptor
        finally:
            os.close(handle)

    def _file(self, there: int, target: int, name: str, status: os.stat_result) -> None:
        here = os.open(name, _CREATE, 0o600, dir_fd=target)
        try:
            self._content(there, here)
            self.finish(here, status)
        finally:
            os.close(here)

    def _content(self, source: int, target: int) -> None:
        status = os.fstat(source)
        self._hash(b"%d" % status.st_size)
        is_cloned = self._try_clone(source, target)
        os.ftruncate(target, status.st_size)
        # The clone is the host's own by now; the digest has to be of it.
        for offset, block in blocks(target if is_cloned else source, status.st_size):
            self.num_bytes += len(block)
            self._check()
            self._hash(b"%d" % offset, block)
            if not is_cloned:
                write_all(target, block, offset)

    def _try_clone(self, source: int, target: int) -> bool:
        """Share the file's blocks between both; False if the file system cannot."""
        if self._can_clone:
            try:
                fcntl.ioctl(target, _FICLONE, source)
            except OSError:
                self._can_clone = False
        return self._can_clone

    def _set_owner(self, target: int, name: str) -> None:
        if self._owner is not None:
            os.chown(name, *self._owner, dir_fd=target, follow_symlinks=False)

    def _hash(self, *parts: bytes) -> None:
        for part in parts:
            self.digest.update(b"%d:" % len(part))
            self.digest.update(part)

    def _check(self) -> None:
        if self._entries > self._limits.max_files or self.num_bytes > self._limits.max_bytes:
            raise TooLargeError(
                f"the workspace holds more than {self._limits.max_files} entries"
                f" or {self._limits.max_bytes} bytes"
            )


@contextlib.contextmanager
def _detect_change() -> Iterator[None]:
    """Turn errors of a name that has changed into one error, apart from those of the disk.

    Raises:
        _ChangedError: it has.
        OSError: it cannot be read.
    """
    try:
        yield
    except OSError as cause:
        if cause.errno not in _CHANGED:
            raise
        raise _ChangedError from cause


@contextlib.contextmanager
def _open_source(name: str, parent: int, flags: int) -> Iterator[int]:
    """Open a file or folder to copy, checked to be one.

    Raises:
        _ChangedError: it is neither any more.
    """
    with contextlib.ExitStack() as opened:
        with _detect_change():
            descriptor = opened.enter_context(open_readable(name, parent, flags))
        kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
        if kind != (stat.S_IFDIR if flags == _FOLDER else stat.S_IFREG):
            raise _ChangedError
        yield descriptor


def blocks(descriptor: int, size: int) -> Iterator[tuple[int, bytes]]:
    """The blocks of a file that are not all zeros, by offset.

    Raises:
        OSError: it cannot be read.
    """
    end = 0
    while end < size:
        try:
            start = os.lseek(descriptor, end, os.SEEK_DATA)
        except OSError as cause:
            if cause.errno != errno.ENXIO:
                raise
            return
        hole = os.lseek(descriptor, start, os.SEEK_HOLE)
        for offset in range(start - start % _BLOCK_BYTES, hole, _BLOCK_BYTES):
            if offset < end:
                continue
            wanted = min(_BLOCK_BYTES, size - offset)
            block = os.pread(descriptor, wanted, offset).ljust(wanted, b"\0")
            if block != _ZEROS[: len(block)]:
                yield offset, block
            end = offset + _BLOCK_BYTES
        end = max(end, hole)


def write_all(descriptor: int, block: bytes, offset: int) -> None:
    """Write all of a block at an offset."""
    view = memoryview(block)
    while view:
        done = os.pwrite(descriptor, view, offset)
        view, offset = view[done:], offset + done


@contextlib.contextmanager
def open_readable(name: str | Path, parent: int | None, flags: int) -> Iterator[int]:
    """Open a file or folder for reading, even if its modes forbid that to its owner.

    Args:
        name: a path, or a name in the parent.
        parent: descriptor of a folder.
        flags: as os.open takes them.
    """
    try:
        descriptor = os.open(name, flags, dir_fd=parent)
    except PermissionError:
        with _open_permitted(name, parent, flags) as descriptor:
            yield descriptor
        return
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _open_permitted(name: str | Path, parent: int | None, flags: int) -> Iterator[int]:
    handle = os.open(name, _HANDLE, dir_fd=parent)
    try:
        entry = _proc_path(handle)
        status = os.fstat(handle)
        os.chmod(entry, 0o700)  # noqa: PTH101 - a descriptor
        try:
            descriptor = os.open(name, flags, dir_fd=parent)
            try:
                yield descriptor
            finally:
                os.close(descriptor)
        finally:
            os.chmod(entry, status.st_mode & _PERMISSIONS)  # noqa: PTH101 - a descriptor
    finally:
        os.close(handle)


def _proc_path(handle: int) -> str:
    """Path of a handle in /proc: chmod works on it, and follows no link."""
    return f"/proc/self/fd/{handle}"
