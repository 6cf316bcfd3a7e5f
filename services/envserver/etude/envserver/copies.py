"""Copies of folders that a hostile process may have filled, with a digest of what was copied.

Kept: regular files with their holes, folders, links as links, pipes; modes of owner, group and
others; times of last change. Left out: sockets and devices, owners, setuid and sticky bits. Names
that share a file get a copy each. What stands in the source is opened without following links. If
somebody changes it meanwhile the copy is of several moments, or fails; its digest is the copy's.
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

from etude.agent.workspace.protocol import MAX_DEPTH
from etude.envserver.folders import Limits, Owner, TooLargeError, current_owner

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


class Copied(NamedTuple):
    """What a copy holds."""

    num_bytes: int
    """Of content; holes and zeros are free."""
    digest: str
    """The same for the same names, kinds, modes and content."""


def copy(source: Path, target: Path, *, limits: Limits, owner: Owner) -> Copied:
    """Make a new folder with what stands in another.

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
        with readable(source, None, _FOLDER) as there:
            copier.folder(there, here, "")
        copier.finish(here, source.lstat())
    finally:
        os.close(here)
    return Copied(copier.num_bytes, copier.digest.hexdigest())


class _Copier:
    def __init__(self, limits: Limits, owner: Owner) -> None:
        self.num_bytes = 0
        self.digest = blake3()
        self._limits = limits
        self._owner = owner if owner != current_owner() else None
        self._entries = 0
        self._can_clone = True

    def folder(self, source: int, target: int, path: str) -> None:
        """Everything that stands in a folder.

        Raises:
            TooLargeError: the folder is too deep.
        """
        if path.count("/") > MAX_DEPTH:
            raise TooLargeError(f"the workspace has folders more than {MAX_DEPTH} deep")
        with os.scandir(source) as entries:
            names = sorted(entry.name for entry in entries)
        self._entries += len(names)
        self._check()
        for name in names:
            try:
                status = os.stat(name, dir_fd=source, follow_symlinks=False)
            except FileNotFoundError:
                continue  # a command in the background has just removed it
            if stat.S_IFMT(status.st_mode) in _KEPT:
                self._entry(source, target, name, status, path)

    def finish(self, target: int, status: os.stat_result) -> None:
        """Give a file or folder the owner, mode and time that it shall have."""
        if self._owner is not None:
            os.fchown(target, *self._owner)
        os.fchmod(target, status.st_mode & _PERMISSIONS)
        os.utime(target, ns=(status.st_mtime_ns, status.st_mtime_ns))

    def _entry(
        self, source: int, target: int, name: str, status: os.stat_result, path: str
    ) -> None:
        kind = stat.S_IFMT(status.st_mode)
        self._say(os.fsencode(path + name), b"%o %o" % (kind, status.st_mode & _PERMISSIONS))
        match kind:
            case stat.S_IFREG:
                self._file(source, target, name)
            case stat.S_IFDIR:
                self._inside(source, target, name, f"{path}{name}/")
            case stat.S_IFLNK:
                self._link(source, target, name)
            case _:
                self._pipe(target, name, status)

    def _inside(self, source: int, target: int, name: str, path: str) -> None:
        os.mkdir(name, 0o700, dir_fd=target)
        here = os.open(name, _FOLDER, dir_fd=target)
        try:
            with readable(name, source, _FOLDER) as there:
                self.folder(there, here, path)
            self.finish(here, os.stat(name, dir_fd=source, follow_symlinks=False))
        finally:
            os.close(here)

    def _link(self, source: int, target: int, name: str) -> None:
        leads_to = os.readlink(name, dir_fd=source)
        self._say(os.fsencode(leads_to))
        os.symlink(leads_to, name, dir_fd=target)
        self._give_away(target, name)

    def _pipe(self, target: int, name: str, status: os.stat_result) -> None:
        os.mkfifo(name, dir_fd=target)
        self._give_away(target, name)
        handle = os.open(name, _HANDLE, dir_fd=target)
        try:
            os.chmod(_entry(handle), status.st_mode & _PERMISSIONS)  # noqa: PTH101 - a descriptor
        finally:
            os.close(handle)

    def _file(self, source: int, target: int, name: str) -> None:
        here = os.open(name, _CREATE, 0o600, dir_fd=target)
        try:
            with readable(name, source, _READ) as there:
                self._content(there, here)
            self.finish(here, os.stat(name, dir_fd=source, follow_symlinks=False))
        finally:
            os.close(here)

    def _content(self, source: int, target: int) -> None:
        """Copy a file.

        Raises:
            OSError: it is no regular file any more.
        """
        status = os.fstat(source)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.ESTALE, "a file was replaced while it was copied")
        self._say(b"%d" % status.st_size)
        is_cloned = self._cloned(source, target)
        os.ftruncate(target, status.st_size)
        # What was cloned is the node's own by now, and is what the digest has to be of.
        for offset, block in blocks(target if is_cloned else source, status.st_size):
            self.num_bytes += len(block)
            self._check()
            self._say(b"%d" % offset, block)
            if not is_cloned:
                write_all(target, block, offset)

    def _cloned(self, source: int, target: int) -> bool:
        """Whether the file system shares the file's blocks between both."""
        if self._can_clone:
            try:
                fcntl.ioctl(target, _FICLONE, source)
            except OSError:
                self._can_clone = False
        return self._can_clone

    def _give_away(self, target: int, name: str) -> None:
        if self._owner is not None:
            os.chown(name, *self._owner, dir_fd=target, follow_symlinks=False)

    def _say(self, *parts: bytes) -> None:
        for part in parts:
            self.digest.update(b"%d:" % len(part))
            self.digest.update(part)

    def _check(self) -> None:
        if self._entries > self._limits.max_files or self.num_bytes > self._limits.max_bytes:
            raise TooLargeError(
                f"the workspace holds more than {self._limits.max_files} entries"
                f" or {self._limits.max_bytes} bytes"
            )


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
    """Write a block at its place, in as many pieces as it takes."""
    view = memoryview(block)
    while view:
        done = os.pwrite(descriptor, view, offset)
        view, offset = view[done:], offset + done


@contextlib.contextmanager
def readable(name: str | Path, parent: int | None, flags: int) -> Iterator[int]:
    """A file or folder opened for reading, whose owner may have forbidden that to himself.

    Args:
        name: a path, or a name in the parent.
        parent: descriptor of a folder.
        flags: as os.open takes them.
    """
    try:
        descriptor = os.open(name, flags, dir_fd=parent)
    except PermissionError:
        with _permitted(name, parent, flags) as descriptor:
            yield descriptor
        return
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _permitted(name: str | Path, parent: int | None, flags: int) -> Iterator[int]:
    handle = os.open(name, _HANDLE, dir_fd=parent)
    try:
        entry = _entry(handle)
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


def _entry(handle: int) -> str:
    """A handle has no modes to change; its entry in /proc, which follows nobody's link, has."""
    return f"/proc/self/fd/{handle}"
