"""A workspace whose files are inside a guest: the same bytes and faults as a folder on the host.

The host checks paths and patterns first, so their errors are its own. What the guest's engine might
see differently, files that are not all UTF-8 and a few patterns, it leaves to the host's engine.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from typing_extensions import override

from etude.agent import patterns
from etude.agent.patterns import FileMatches, GrepLine, GrepQuery, PatternError
from etude.agent.search.codebase import Codebase
from etude.agent.workspace import (
    MAX_FILE_BYTES,
    ExecResult,
    FileInfo,
    FileKind,
    PathFault,
    Runner,
    Workspace,
    WorkspaceError,
    WorkspaceLostError,
    relative_path,
)
from etude.agent.workspace.jobs import Jobs, NoJobs
from etude.agent.workspace.notes import MemoryNotes, Notes
from etude.envserver.guest import replies
from etude.envserver.guest.calls import GuestCaller, GuestReply, GuestRequest, ReplyTooLargeError
from etude.v1 import guest_pb2

_KINDS = {
    guest_pb2.GUEST_KIND_FILE: FileKind.FILE,
    guest_pb2.GUEST_KIND_FOLDER: FileKind.FOLDER,
    guest_pb2.GUEST_KIND_OTHER: FileKind.OTHER,
}
_SKIPPED = frozenset(
    {
        *(PathFault.NO_SUCH_FILE, PathFault.IS_A_FOLDER, PathFault.NOT_A_FILE, PathFault.LINK),
        *(PathFault.TOO_LARGE, PathFault.DENIED, PathFault.NOT_A_FOLDER),
    }
)
"""Faults that a search skips: the file has changed since it was listed."""
_DEADLINE_S = 60.0
"""Of file operations: 8 MiB through a port that is emulated on a busy host."""
_MAX_NAMES_BYTES = 128 << 20
"""100,000 names of 1 KiB, and what the message adds to them."""
_MAX_MATCHES_BYTES = 64 << 20


@dataclass(slots=True)
class GuestWorkspace(Workspace):
    """The files of one sandbox; commands go to the given runner."""

    channel: GuestCaller
    run: Runner
    codebase: Codebase = field(default_factory=Codebase)
    notes: Notes = field(default_factory=MemoryNotes)
    jobs: Jobs = field(default_factory=NoJobs)
    search_limit_s: float = 20.0
    cwd: str = ""
    """Absolute folder in the guest that paths start from; empty is the workspace."""

    @override
    async def read(self, path: str) -> bytes:
        call = self._call(read=guest_pb2.GuestRead(path=relative_path(path)))
        data = (await self._ask(call, path)).data.get(0, b"")
        if len(data) > MAX_FILE_BYTES:
            raise WorkspaceError(PathFault.TOO_LARGE, path)
        return data

    @override
    async def write(self, path: str, data: bytes) -> None:
        if len(data) > MAX_FILE_BYTES:
            raise WorkspaceError(PathFault.TOO_LARGE, path)
        write = guest_pb2.GuestWrite(
            path=relative_path(path), size=len(data), sha256=hashlib.sha256(data).digest()
        )
        await self._ask(self._call(write=write), path, data=data)

    @override
    async def stat(self, path: str) -> FileInfo:
        clean = relative_path(path)
        reply = await self._ask(self._call(stat=guest_pb2.GuestStat(path=clean)), path)
        return _info(clean, reply.result.info.kind, reply.result.info.size)

    @override
    async def list(self, path: str) -> Sequence[FileInfo]:
        clean = relative_path(path)
        prefix = clean and clean + "/"
        call = self._call(list=guest_pb2.GuestList(path=clean))
        reply = await self._ask(call, path, max_bytes=_MAX_NAMES_BYTES)
        entries = replies.decode_body(reply, 0, guest_pb2.GuestEntries()).entries
        return [_info(prefix + entry.name, entry.kind, entry.size) for entry in entries]

    @override
    async def glob(self, pattern: str) -> Sequence[str]:
        patterns.glob_matcher(pattern)
        call = self._call(glob=guest_pb2.GuestGlob(pattern=pattern))
        reply = await self._ask(call, "", max_bytes=_MAX_NAMES_BYTES)
        if reply.result.status == guest_pb2.GUEST_STATUS_UNSUPPORTED:
            found = await self._walk("", "", hidden=patterns.names_hidden(pattern))
            return patterns.match_glob(pattern, _sorted(info.path for info in found))
        return list(replies.decode_body(reply, 0, guest_pb2.GuestPaths()).paths)

    @override
    async def grep(self, query: GrepQuery) -> Sequence[FileMatches]:
        matcher = patterns.grep_matcher(query)
        start = relative_path(query.path)
        native = await self._native_grep(query, start) if _are_globs(query.globs) else None
        if native is None:
            return await self._host_grep(matcher, query, start)
        hits = [_matches(file) for file in native.files]
        hits += await self._searched(matcher, query, native.undecided)
        return _limited(hits, query.limit)

    @override
    async def hashes(self) -> Mapping[str, bytes]:
        found = await self._walk("", "", hidden=False)
        wanted = {info.path for info in found if info.size <= MAX_FILE_BYTES}
        call = self._call(hashes=guest_pb2.GuestHashes())
        reply = await self._ask(call, "", max_bytes=_MAX_NAMES_BYTES)
        files = replies.decode_body(reply, 0, guest_pb2.GuestDigests()).files
        return {file.path: file.sha256 for file in files if file.path in wanted}

    @override
    async def delete(self, path: str) -> None:
        call = self._call(delete=guest_pb2.GuestDelete(path=relative_path(path)))
        await self._ask(call, path)

    @override
    async def exec(self, command: str, *, timeout_s: float) -> ExecResult:
        return await self.run(command, timeout_s)

    async def _native_grep(self, query: GrepQuery, start: str) -> guest_pb2.GuestMatches | None:
        grep = guest_pb2.GuestGrep(
            path=start,
            pattern=query.pattern,
            is_literal=query.is_literal,
            globs=query.globs,
            ignore_case=query.ignore_case,
            multiline=query.multiline,
            before=query.before,
            after=query.after,
            limit=max(query.limit, 0),
            time_limit_ms=max(1, round(1000 * self.search_limit_s)),
        )
        try:
            call = self._call(grep=grep)
            reply = await self._ask(call, query.path, max_bytes=_MAX_MATCHES_BYTES)
        except (ReplyTooLargeError, ValueError):
            return None
        if reply.result.status == guest_pb2.GUEST_STATUS_UNSUPPORTED:
            return None
        return replies.decode_body(reply, 1, guest_pb2.GuestMatches())

    async def _host_grep(
        self, matcher: patterns.PatternMatcher, query: GrepQuery, start: str
    ) -> Sequence[FileMatches]:
        found = await self._walk(start, query.path, hidden=patterns.wants_hidden(query))
        wanted = [f.path for f in found if patterns.is_searched(query, start, f.path, f.size)]
        return _limited(await self._searched(matcher, query, wanted), query.limit)

    async def _searched(
        self, matcher: patterns.PatternMatcher, query: GrepQuery, paths: Iterable[str]
    ) -> Sequence[FileMatches]:
        """Matches of the host's engine in these files.

        Raises:
            WorkspaceError: one of them cannot be read for a reason that is not its own.
        """
        hits: list[FileMatches] = []
        for path in paths:
            try:
                data = await self.read(path)
            except WorkspaceError as error:
                if error.fault in _SKIPPED:
                    continue
                raise
            hit = data and patterns.file_matches(matcher, query, path, data)
            hits += [hit] if hit else []
        return hits

    async def _walk(self, start: str, path: str, *, hidden: bool) -> Sequence[FileInfo]:
        call = self._call(walk=guest_pb2.GuestWalk(path=start, hidden=hidden))
        reply = await self._ask(call, path, max_bytes=_MAX_NAMES_BYTES)
        entries = replies.decode_body(reply, 0, guest_pb2.GuestEntries()).entries
        return [_info(entry.name, entry.kind, entry.size) for entry in entries]

    def _call(self, **operation: object) -> guest_pb2.GuestCall:
        return guest_pb2.GuestCall(cwd=self.cwd, **operation)  # type: ignore[arg-type] # one field

    async def _ask(
        self,
        operation: guest_pb2.GuestCall,
        path: str,
        *,
        data: bytes | None = None,
        max_bytes: int = MAX_FILE_BYTES + (1 << 20),
    ) -> GuestReply:
        reply = await self.channel.call(
            GuestRequest(
                operation=operation, data=data, deadline_s=_DEADLINE_S, max_bytes=max_bytes
            )
        )
        if reply.result.status == guest_pb2.GUEST_STATUS_UNSUPPORTED:
            return reply
        return replies.check_reply(reply, path)


def _info(path: str, kind: int, size: int) -> FileInfo:
    known = _KINDS.get(kind)  # type: ignore[call-overload] # the guest's number may be any
    if known is None:
        raise WorkspaceLostError(f"{path}: the guest knows a kind {kind} of file")
    return FileInfo(path, known, size if known is FileKind.FILE else 0)


def _matches(file: guest_pb2.GuestFileMatches) -> FileMatches:
    lines = tuple(GrepLine(x.number, x.text, is_match=x.is_match) for x in file.lines)
    return FileMatches(file.path, lines, file.num_matches)


def _limited(hits: Sequence[FileMatches], limit: int) -> Sequence[FileMatches]:
    return patterns.limit_matches(sorted(hits, key=lambda hit: hit.path.encode()), limit)


def _are_globs(globs: Iterable[str]) -> bool:
    """True if all parse; otherwise a search fails only when it reaches the bad one."""
    try:
        for glob in globs:
            patterns.glob_matcher(glob)
    except PatternError:
        return False
    return True


def _sorted(paths: Iterable[str]) -> list[str]:
    return sorted(paths, key=str.encode)
