"""The regular files below a folder, while it may change."""

import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from etude.agent.workspace import descriptors
from etude.agent.workspace.interface import MAX_DEPTH, MAX_FILES, WorkspaceError

_T = TypeVar("_T")


class WalkedFile(NamedTuple):
    """One file of a walk; valid until the walk goes on."""

    path: str
    folder: int
    """Descriptor of the file's folder, open until the walk goes on."""
    size: int

    def get(self, use: Callable[[int, str, str], _T]) -> _T | None:
        """Apply a function to the file; None if the file changed during the walk."""
        try:
            return use(self.folder, self.path.rpartition("/")[2], self.path)
        except (FileNotFoundError, PermissionError, WorkspaceError):
            return None


@dataclass(slots=True, kw_only=True)
class Walk:
    """One pass over the regular files below a folder, bounded in depth and number."""

    hidden: bool
    entries_left: int = MAX_FILES

    def below(self, folder: int, name: str, path: str) -> Iterator[WalkedFile]:
        """The file with this name, or the files below the folder with this name."""
        status = os.stat(name or ".", dir_fd=folder, follow_symlinks=False)
        if stat.S_ISREG(status.st_mode):
            yield WalkedFile(path, folder, status.st_size)
            return
        inner = descriptors.enter(folder, name or ".", path)
        try:
            yield from self.files(inner, path and path + "/")
        finally:
            os.close(inner)

    def files(self, folder: int, prefix: str) -> Iterator[WalkedFile]:
        """Files below an open folder, each folder in bytewise order."""
        entries = descriptors.list_entries(folder, self.entries_left, prefix.rstrip("/"))
        self.entries_left -= len(entries)
        for name, status in entries:
            path = prefix + name
            if name.startswith(".") and not self.hidden:
                continue
            if stat.S_ISREG(status.st_mode):
                yield WalkedFile(path, folder, status.st_size)
            elif stat.S_ISDIR(status.st_mode) and path.count("/") < MAX_DEPTH:
                yield from self._inside(folder, name, path)

    def _inside(self, folder: int, name: str, path: str) -> Iterator[WalkedFile]:
        try:
            inner = descriptors.enter(folder, name, path)
        except (FileNotFoundError, NotADirectoryError, PermissionError, WorkspaceError):
            return  # removed or replaced during the walk: skip it
        try:
            yield from self.files(inner, path + "/")
        finally:
            os.close(inner)
