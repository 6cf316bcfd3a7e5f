"""Workspaces on disk: written, read back and removed without following links."""

import itertools
import os
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from etude.agent.workspace.interface import MAX_DEPTH
from etude.common.errors import WrongStateError
from etude.envserver.storage.trees import File, Tree

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_AT_ONCE = 10_000
"""Names listed at a time while a folder is removed."""
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class Owner(NamedTuple):
    """User and group of a workspace's files on the host."""

    uid: int
    gid: int


def current_owner() -> Owner:
    """The user and group of this process."""
    return Owner(os.geteuid(), os.getegid())


class FolderLimits(NamedTuple):
    """Limits on reading a folder."""

    max_files: int
    max_bytes: int


DIFF = FolderLimits(max_files=20_000, max_bytes=64 << 20)
SMALL = FolderLimits(max_files=256, max_bytes=1 << 20)
"""Cheap enough to read around every command."""


class TooLargeError(WrongStateError):
    """The folder holds more than the limit allows to read."""

    reason = "WorkspaceTooLarge"


class FolderContent(NamedTuple):
    """Content of a folder."""

    tree: dict[str, File]
    is_plain: bool
    """True if the tree is complete: no links, no devices, no empty folders, nothing unreadable."""


def write_tree(folder: Path, tree: Tree, owner: Owner) -> None:
    """Write a new folder with these files, for a process of this owner."""
    folder.mkdir()
    made = {""}
    is_other = owner != current_owner()
    if is_other:
        os.chown(folder, *owner)
    base = str(folder)
    for path, file in tree.items():
        for parent in _parents(path):
            if parent not in made:
                os.mkdir(f"{base}/{parent}")  # noqa: PTH102 - Path objects cost half of a copy
                made.add(parent)
                if is_other:
                    os.chown(f"{base}/{parent}", *owner)
        mode = 0o755 if file.executable else 0o644
        descriptor = os.open(f"{base}/{path}", _CREATE, mode)
        try:
            if is_other:
                os.fchown(descriptor, *owner)
            _write_all(descriptor, file.content)
        finally:
            os.close(descriptor)


def _write_all(descriptor: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]


def _parents(path: str) -> Iterator[str]:
    at = path.find("/")
    while at >= 0:
        yield path[:at]
        at = path.find("/", at + 1)


def read_tree(folder: Path, limits: FolderLimits) -> FolderContent:
    """Read the regular files below a folder that a hostile process may have filled.

    Raises:
        TooLargeError: there is more than the limits allow.
        FileNotFoundError: there is no such folder.
    """
    reader = _Reader(limits)
    root = os.open(folder, _FOLDER)
    try:
        reader.folder(root, "")
    finally:
        os.close(root)
    return FolderContent(reader.tree, reader.is_plain)


class _Reader:
    def __init__(self, limits: FolderLimits) -> None:
        self.tree: dict[str, File] = {}
        self.is_plain = True
        self._limits = limits
        self._entries = 0
        self._bytes = 0

    def folder(self, descriptor: int, prefix: str) -> None:
        found = list(self._scan(descriptor))
        if prefix and not found:
            self.is_plain = False
        for entry in found:
            path = prefix + entry.name
            if entry.is_file(follow_symlinks=False):
                self._file(descriptor, entry.name, path)
            elif entry.is_dir(follow_symlinks=False):
                self._descend(descriptor, entry.name, path)
            else:
                self.is_plain = False

    def _scan(self, descriptor: int) -> Iterator["os.DirEntry[str]"]:
        with os.scandir(descriptor) as entries:
            for entry in entries:
                self._entries += 1
                self._check()
                yield entry

    def _descend(self, folder: int, name: str, path: str) -> None:
        if path.count("/") >= MAX_DEPTH:
            raise TooLargeError(f"the workspace has folders more than {MAX_DEPTH} deep")
        try:
            inner = os.open(name, _FOLDER, dir_fd=folder)
        except OSError:
            self.is_plain = False
            return
        try:
            self.folder(inner, path + "/")
        finally:
            os.close(inner)

    def _file(self, folder: int, name: str, path: str) -> None:
        try:
            descriptor = os.open(name, _READ, dir_fd=folder)
        except OSError:
            self.is_plain = False
            return
        try:
            status = os.fstat(descriptor)
            self._bytes += status.st_size
            self._check()
            content = os.read(descriptor, status.st_size + 1)
        finally:
            os.close(descriptor)
        if not stat.S_ISREG(status.st_mode) or len(content) != status.st_size or not _is_text(path):
            self.is_plain = False
        else:
            self.tree[path] = File(content, bool(status.st_mode & stat.S_IXUSR))

    def _check(self) -> None:
        if self._entries > self._limits.max_files or self._bytes > self._limits.max_bytes:
            raise TooLargeError(
                f"the workspace holds more than {self._limits.max_files} files"
                f" or {self._limits.max_bytes} bytes"
            )


def _is_text(path: str) -> bool:
    return not any("\ud800" <= letter <= "\udfff" for letter in path)


def remove_folder(folder: Path) -> None:
    """Remove a folder with everything in it, whatever depth and modes its owner left behind.

    Inner folders are moved to the top one by one: their paths may be longer than any call takes,
    and their levels more than a process has descriptors.
    """
    try:
        top = _open_folder(folder)
    except FileNotFoundError:
        return
    except NotADirectoryError:
        folder.unlink()
        return
    try:
        while found := _list_some(top):
            for entry in found:
                if entry.is_dir(follow_symlinks=False):
                    _empty_folder(entry.name, top)
                    os.rmdir(entry.name, dir_fd=top)
                else:
                    os.unlink(entry.name, dir_fd=top)
    finally:
        os.close(top)
    folder.rmdir()


def _list_some(folder: int) -> list["os.DirEntry[str]"]:
    """The first 10,000 entries of a folder, which may have millions."""
    with os.scandir(folder) as entries:
        return list(itertools.islice(entries, _AT_ONCE))


def _empty_folder(name: str, top: int) -> None:
    """Move the folders inside a folder up to the top one, and remove all else in it."""
    inner = _open_folder(name, top)
    try:
        while found := _list_some(inner):
            for entry in found:
                if entry.is_dir(follow_symlinks=False):
                    # Moving a folder writes to it, so its modes come first.
                    os.close(_open_folder(entry.name, inner))
                    os.rename(entry.name, uuid.uuid4().hex, src_dir_fd=inner, dst_dir_fd=top)
                else:
                    os.unlink(entry.name, dir_fd=inner)
    finally:
        os.close(inner)


def _open_folder(name: str | Path, parent: int | None = None) -> int:
    """Open a folder, after giving its owner all permissions on it."""
    handle = os.open(name, os.O_PATH | _FOLDER, dir_fd=parent)
    try:
        # The handle itself has no modes to change; its entry in /proc follows no link.
        os.chmod(f"/proc/self/fd/{handle}", 0o700)  # noqa: PTH101 - no path, a descriptor
        return os.open(".", _FOLDER, dir_fd=handle)
    finally:
        os.close(handle)
