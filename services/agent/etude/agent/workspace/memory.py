"""A workspace in memory, for generators of transcripts and for tests."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from typing_extensions import override

from etude.agent import patterns
from etude.agent.patterns import FileMatches, GrepQuery
from etude.agent.search.codebase import Codebase
from etude.agent.workspace.interface import (
    MAX_FILE_BYTES,
    ExecResult,
    FileInfo,
    FileKind,
    PathFault,
    Runner,
    Workspace,
    WorkspaceError,
    parents,
    relative_path,
)
from etude.agent.workspace.jobs import Jobs, NoJobs
from etude.agent.workspace.notes import MemoryNotes, Notes


@dataclass(slots=True)
class MemoryWorkspace(Workspace):
    """Files in a dict, which the runner may share and change."""

    files: dict[str, bytes]
    run: Runner
    codebase: Codebase = field(default_factory=Codebase)
    notes: Notes = field(default_factory=MemoryNotes)
    jobs: Jobs = field(default_factory=NoJobs)
    _folders: set[str] = field(default_factory=set)
    """Folders that once held something, as a file system would keep them."""

    @override
    async def read(self, path: str) -> bytes:
        info = await self.stat(path)
        if info.kind is FileKind.FOLDER:
            raise WorkspaceError(PathFault.IS_A_FOLDER, path)
        if info.size > MAX_FILE_BYTES:
            raise WorkspaceError(PathFault.TOO_LARGE, path)
        return self.files[info.path]

    @override
    async def write(self, path: str, data: bytes) -> None:
        if len(data) > MAX_FILE_BYTES:
            raise WorkspaceError(PathFault.TOO_LARGE, path)
        name = relative_path(path)
        if name in self._all_folders():
            raise WorkspaceError(PathFault.IS_A_FOLDER, path)
        if any(parent in self.files for parent in parents(name)):
            raise WorkspaceError(PathFault.NOT_A_FOLDER, path)
        self.files[name] = data

    @override
    async def stat(self, path: str) -> FileInfo:
        name = relative_path(path)
        if name in self.files:
            return FileInfo(name, FileKind.FILE, len(self.files[name]))
        if any(parent in self.files for parent in parents(name)):
            raise WorkspaceError(PathFault.NOT_A_FOLDER, path)
        if name not in self._all_folders():
            raise WorkspaceError(PathFault.NO_SUCH_FILE, path)
        return FileInfo(name, FileKind.FOLDER, 0)

    @override
    async def list(self, path: str) -> Sequence[FileInfo]:
        name = (await self.stat(path)).path
        if name in self.files:
            raise WorkspaceError(PathFault.NOT_A_FOLDER, path)
        inside = name and name + "/"
        names = [n for n in (*self.files, *self._all_folders()) if n.startswith(inside)]
        children = {inside + n[len(inside) :].partition("/")[0] for n in names if n != name}
        return [await self.stat(child) for child in sorted(children, key=str.encode)]

    @override
    async def glob(self, pattern: str) -> Sequence[str]:
        return patterns.match_glob(pattern, sorted(self.files, key=str.encode))

    @override
    async def grep(self, query: GrepQuery) -> Sequence[FileMatches]:
        matcher = patterns.grep_matcher(query)
        start = (await self.stat(query.path)).path
        hits: list[FileMatches] = []
        for path in sorted(self.files, key=str.encode):
            data = self.files[path]
            if patterns.is_searched(query, start, path, len(data)):
                hit = patterns.file_matches(matcher, query, path, data)
                hits += [hit] if hit else []
        return patterns.limit_matches(hits, query.limit)

    @override
    async def hashes(self) -> Mapping[str, bytes]:
        return {
            path: hashlib.sha256(data).digest()
            for path, data in self.files.items()
            if not patterns.is_hidden(path) and len(data) <= MAX_FILE_BYTES
        }

    @override
    async def delete(self, path: str) -> None:
        info = await self.stat(path)
        if info.kind is FileKind.FOLDER:
            raise WorkspaceError(PathFault.IS_A_FOLDER, path)
        self._all_folders()
        del self.files[info.path]

    @override
    async def exec(self, command: str, *, timeout_s: float) -> ExecResult:
        return await self.run(command, timeout_s)

    def _all_folders(self) -> set[str]:
        """All folders, those of present files included."""
        self._folders.add("")
        for path in self.files:
            if "/" in path:
                self._folders.update(parents(path))
        return self._folders
