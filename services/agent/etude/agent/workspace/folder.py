"""A workspace in a folder that a hostile process may change at any moment.

Covered: every path is walked from the root one descriptor at a time, without following symbolic
links, so nothing outside of the root is read, written, listed or deleted, also while folders are
exchanged for links underneath; FIFOs, sockets and devices are never opened for data; sizes, depths
and counts are bounded. Not covered: hard links that the sandbox was able to make, which show no
more than it could read itself; the quota of what is written.
"""

import asyncio
import contextlib
import errno
import hashlib
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from typing_extensions import override

from etude.agent import patterns
from etude.agent.patterns import FileMatches, GrepQuery
from etude.agent.search.codebase import Codebase
from etude.agent.workspace import descriptors
from etude.agent.workspace.interface import (
    MAX_FILE_BYTES,
    MAX_FILES,
    ExecResult,
    FileInfo,
    FileKind,
    PathFault,
    Runner,
    Workspace,
    WorkspaceError,
    WorkspaceLostError,
    printable_path,
    relative_path,
)
from etude.agent.workspace.jobs import Jobs, NoJobs
from etude.agent.workspace.notes import MemoryNotes, Notes
from etude.agent.workspace.walk import Walk

_FAULTS = {
    errno.ENOENT: PathFault.NO_SUCH_FILE,
    errno.ENOTDIR: PathFault.NOT_A_FOLDER,
    errno.EISDIR: PathFault.IS_A_FOLDER,
    errno.ELOOP: PathFault.LINK,
    errno.ENXIO: PathFault.NOT_A_FILE,
    errno.ENAMETOOLONG: PathFault.BAD_NAME,
    errno.EACCES: PathFault.DENIED,
    errno.EPERM: PathFault.DENIED,
    errno.EROFS: PathFault.DENIED,
    errno.ENOSPC: PathFault.NO_SPACE,
    errno.EDQUOT: PathFault.NO_SPACE,
    errno.EFBIG: PathFault.NO_SPACE,
}
"""Errors that the policy can cause and correct; all others are the platform's."""


@dataclass(slots=True)
class FolderWorkspace(Workspace):
    """The files under one folder, and a runner that executes commands in it."""

    root: Path
    run: Runner
    codebase: Codebase = field(default_factory=Codebase)
    notes: Notes = field(default_factory=MemoryNotes)
    jobs: Jobs = field(default_factory=NoJobs)
    owner: tuple[int, int] | None = None
    """User and group of written files, if not this process's: the sandbox's."""
    search_limit_s: float = 20.0
    """Longest search; 12,000 files of a standard library take 1.3 s."""

    @override
    async def read(self, path: str) -> bytes:
        with _translate_errors(path), self._parent(path) as (folder, name):
            return descriptors.read(folder, name, path)

    @override
    async def write(self, path: str, data: bytes) -> None:
        if len(data) > MAX_FILE_BYTES:
            raise WorkspaceError(PathFault.TOO_LARGE, path)
        with _translate_errors(path), self._parent(path, create=True) as (folder, name):
            descriptors.write(folder, name, path, data, self.owner)

    @override
    async def stat(self, path: str) -> FileInfo:
        with _translate_errors(path), self._parent(path) as (folder, name):
            status = os.stat(name or ".", dir_fd=folder, follow_symlinks=False)
            return descriptors.file_info(relative_path(path), status)

    @override
    async def list(self, path: str) -> Sequence[FileInfo]:
        clean = relative_path(path)
        prefix = clean and clean + "/"
        with _translate_errors(path), self._folder(clean) as folder:
            entries = descriptors.list_entries(folder, MAX_FILES, path)
            return [descriptors.file_info(prefix + entry.name, entry.status) for entry in entries]

    @override
    async def glob(self, pattern: str) -> Sequence[str]:
        patterns.glob_matcher(pattern)
        paths = await asyncio.to_thread(self._paths, hidden=patterns.names_hidden(pattern))
        return patterns.match_glob(pattern, paths)

    @override
    async def grep(self, query: GrepQuery) -> Sequence[FileMatches]:
        matcher = patterns.grep_matcher(query)
        return await asyncio.to_thread(self._grep, matcher, query)

    @override
    async def hashes(self) -> Mapping[str, bytes]:
        return await asyncio.to_thread(self._hashes)

    @override
    async def delete(self, path: str) -> None:
        with _translate_errors(path), self._parent(path) as (folder, name):
            if not name:
                raise WorkspaceError(PathFault.IS_A_FOLDER, path)
            os.unlink(name, dir_fd=folder)

    @override
    async def exec(self, command: str, *, timeout_s: float) -> ExecResult:
        return await self.run(command, timeout_s)

    def files(self, path: str, *, hidden: bool) -> Sequence[FileInfo]:
        """The regular files at or below a path, in the order of the walk.

        Raises:
            WorkspaceError: the path is not a file or folder, or holds too many files.
        """
        with _translate_errors(path), self._parent(path) as (folder, name):
            walk = Walk(hidden=hidden).below(folder, name, relative_path(path))
            return [FileInfo(found.path, FileKind.FILE, found.size) for found in walk]

    def _paths(self, *, hidden: bool) -> Sequence[str]:
        return _sort_paths(found.path for found in self.files("", hidden=hidden))

    def _hashes(self) -> Mapping[str, bytes]:
        found: dict[str, bytes] = {}
        deadline_s = time.monotonic() + self.search_limit_s
        with _translate_errors(""), self._parent("") as (folder, name):
            for file in Walk(hidden=False).below(folder, name, ""):
                if time.monotonic() > deadline_s:
                    raise WorkspaceError(PathFault.TOO_SLOW, "")
                data = file.get(descriptors.read) if file.size <= MAX_FILE_BYTES else None
                if data is not None:
                    found[file.path] = hashlib.sha256(data).digest()
        return found

    def _grep(self, matcher: patterns.PatternMatcher, query: GrepQuery) -> Sequence[FileMatches]:
        start = relative_path(query.path)
        hits: list[FileMatches] = []
        deadline_s = time.monotonic() + self.search_limit_s
        with _translate_errors(query.path), self._parent(query.path) as (folder, name):
            for found in Walk(hidden=patterns.wants_hidden(query)).below(folder, name, start):
                if not patterns.is_searched(query, start, found.path, found.size):
                    continue
                if time.monotonic() > deadline_s:
                    raise WorkspaceError(PathFault.TOO_SLOW, query.path)
                data = found.get(descriptors.read)
                hit = data and patterns.file_matches(matcher, query, found.path, data)
                hits += [hit] if hit else []
        hits.sort(key=lambda hit: hit.path.encode())
        return patterns.limit_matches(hits, query.limit)

    @contextlib.contextmanager
    def _parent(self, path: str, *, create: bool = False) -> Iterator[tuple[int, str]]:
        folder_path, _, name = relative_path(path).rpartition("/")
        with self._folder(folder_path, create=create) as folder:
            yield folder, name

    @contextlib.contextmanager
    def _folder(self, path: str, *, create: bool = False) -> Iterator[int]:
        """Descriptor of a folder, reached from the root without following any link.

        Raises:
            WorkspaceLostError: the root itself cannot be opened.
        """
        try:
            folder = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise WorkspaceLostError(f"{self.root}: {error}") from error
        try:
            for name in path.split("/") if path else ():
                inner = descriptors.enter(folder, name, path, create=create, owner=self.owner)
                os.close(folder)
                folder = inner
            yield folder
        finally:
            os.close(folder)


@contextlib.contextmanager
def _translate_errors(path: str) -> Iterator[None]:
    """Distinguish errors that the policy can correct from a broken platform.

    Raises:
        WorkspaceError: the policy's.
        WorkspaceLostError: the platform's.
    """
    try:
        yield
    except OSError as error:
        fault = _FAULTS.get(error.errno or 0)
        if fault is None:
            raise WorkspaceLostError(f"{printable_path(path)}: {error}") from error
        raise WorkspaceError(fault, printable_path(path)) from error


def _sort_paths(paths: Iterable[str]) -> list[str]:
    return sorted(paths, key=str.encode)
