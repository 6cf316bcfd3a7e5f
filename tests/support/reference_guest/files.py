"""Files as the reference agent does them: with the workspace of a folder."""

import contextlib
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from tests.support.reference_guest.calls import Call, Operation, RefusedError

from etude.agent.patterns import GrepQuery
from etude.agent.workspace import (
    MAX_FILE_BYTES,
    ExecResult,
    FileKind,
    FolderWorkspace,
    PathFault,
    WorkspaceError,
    relative_path,
)
from etude.envserver.storage import folders, trees
from etude.envserver.storage.folders import FolderLimits, TooLargeError
from etude.envserver.storage.trees import File
from etude.v1 import guest_pb2

Marks = dict[str, Mapping[str, File]]
"""Named states of the workspace."""
_MARK = FolderLimits(max_files=100_000, max_bytes=1 << 30)
_KINDS = {
    FileKind.FILE: guest_pb2.GUEST_KIND_FILE,
    FileKind.FOLDER: guest_pb2.GUEST_KIND_FOLDER,
    FileKind.OTHER: guest_pb2.GUEST_KIND_OTHER,
}
_MAX_MARKS = 16


class _HasMarks(Protocol):
    @property
    def marks(self) -> Marks: ...


async def _no_commands(_command: str, _timeout_s: float) -> ExecResult:
    raise RefusedError(guest_pb2.GUEST_STATUS_INTERNAL, "files run no commands")


def _workspace(call: Call, *, search_limit_s: float = 20.0) -> FolderWorkspace:
    owner = None if call.uid is None else (call.uid, call.uid)
    root = Path(call.folder)
    return FolderWorkspace(root, _no_commands, owner=owner, search_limit_s=search_limit_s)


def _clean(path: str) -> str:
    try:
        is_clean = relative_path(path) == path
    except WorkspaceError:
        is_clean = False
    if not is_clean:
        raise WorkspaceError(PathFault.BAD_NAME, path)
    return path


def _info(call: Call, path: str) -> guest_pb2.GuestInfo:
    found = os.lstat(Path(call.folder) / path)
    return guest_pb2.GuestInfo(size=found.st_size, mode=found.st_mode & 0o7777)


async def _read(call: Call, _agent: object) -> guest_pb2.GuestResult:
    asked = call.request.read
    data = await _workspace(call).read(_clean(asked.path))
    piece = data[asked.offset :][: asked.limit or len(data)]
    await call.data(0, piece)
    info = _info(call, asked.path)
    info.kind, info.size = guest_pb2.GUEST_KIND_FILE, len(data)
    info.sha256 = hashlib.sha256(piece).digest() if asked.digest else b""
    return guest_pb2.GuestResult(info=info)


async def _write(call: Call, _agent: object) -> guest_pb2.GuestResult:
    asked = call.request.write
    path = _clean(asked.path)
    if asked.size > MAX_FILE_BYTES:
        raise WorkspaceError(PathFault.TOO_LARGE, path)
    await _check_target(call, path)
    if asked.expected_sha256:
        await _expect(call, path, asked.expected_sha256)
    data = await _announced(call, asked)
    await _workspace(call).write(path, data)
    if asked.mode:
        (Path(call.folder) / path).chmod(asked.mode & 0o777)
    info = _info(call, path)
    info.kind, info.sha256 = guest_pb2.GUEST_KIND_FILE, asked.sha256
    return guest_pb2.GuestResult(info=info)


async def _check_target(call: Call, path: str) -> None:
    """Refuse what cannot be replaced before any data comes.

    Raises:
        WorkspaceError: it cannot.
    """
    try:
        found = await _workspace(call).stat(path)
    except WorkspaceError as error:
        if error.fault is not PathFault.NO_SUCH_FILE:
            raise
        return
    if found.kind is not FileKind.FILE:
        await _workspace(call).read(path)


async def _expect(call: Call, path: str, digest: bytes) -> None:
    try:
        present = await _workspace(call).read(path)
    except WorkspaceError as error:
        if error.fault is not PathFault.NO_SUCH_FILE:
            raise
        present = None
    if present is None or hashlib.sha256(present).digest() != digest:
        raise RefusedError(guest_pb2.GUEST_STATUS_CONFLICT, "the file is not the expected one")


async def _announced(call: Call, asked: guest_pb2.GuestWrite) -> bytes:
    data = bytearray()
    while len(data) <= asked.size and (piece := await call.receive()) is not None:
        data += piece
    if len(data) != asked.size or hashlib.sha256(data).digest() != asked.sha256:
        wrong = "the data has another size or digest than announced"
        raise RefusedError(guest_pb2.GUEST_STATUS_INVALID, wrong)
    return bytes(data)


async def _list(call: Call, _agent: object) -> None:
    found = await _workspace(call).list(_clean(call.request.list.path))
    entries = guest_pb2.GuestEntries()
    for info in found:
        name = info.path.rpartition("/")[2]
        entries.entries.add(name=name, kind=_KINDS[info.kind], size=info.size)
    await call.data(0, entries.SerializeToString())


async def _stat(call: Call, _agent: object) -> guest_pb2.GuestResult:
    found = await _workspace(call).stat(_clean(call.request.stat.path))
    info = _info(call, found.path)
    info.kind, info.size = _KINDS[found.kind], found.size
    return guest_pb2.GuestResult(info=info)


async def _delete(call: Call, _agent: object) -> None:
    await _workspace(call).delete(_clean(call.request.delete.path))


async def _glob(call: Call, _agent: object) -> None:
    paths = await _workspace(call).glob(call.request.glob.pattern)
    await call.data(0, guest_pb2.GuestPaths(paths=paths).SerializeToString())


async def _grep(call: Call, _agent: object) -> None:
    asked = call.request.grep
    limit_s = asked.time_limit_ms / 1000 or 20.0
    query = GrepQuery(
        pattern=asked.pattern,
        is_literal=asked.is_literal,
        path=_clean(asked.path),
        globs=tuple(asked.globs),
        ignore_case=asked.ignore_case,
        multiline=asked.multiline,
        before=asked.before,
        after=asked.after,
        limit=asked.limit,
    )
    matches = guest_pb2.GuestMatches()
    for file in await _workspace(call, search_limit_s=limit_s).grep(query):
        hit = matches.files.add(path=file.path, num_matches=file.num_matches)
        for line in file.lines:
            hit.lines.add(number=line.number, text=line.text, is_match=line.is_match)
    await call.data(1, matches.SerializeToString())


async def _walk(call: Call, _agent: object) -> None:
    asked = call.request.walk
    found = _workspace(call).files(_clean(asked.path), hidden=asked.hidden)
    entries = guest_pb2.GuestEntries()
    for info in found:
        entries.entries.add(name=info.path, kind=_KINDS[info.kind], size=info.size)
    await call.data(0, entries.SerializeToString())


async def _hashes(call: Call, _agent: object) -> None:
    digests = guest_pb2.GuestDigests()
    for info in _workspace(call).files(_clean(call.request.hashes.path), hidden=True):
        with contextlib.suppress(FileNotFoundError, PermissionError):
            digest = hashlib.sha256((Path(call.folder) / info.path).read_bytes()).digest()
            digests.files.add(path=info.path, sha256=digest)
    await call.data(0, digests.SerializeToString())


async def _mark(call: Call, agent: _HasMarks) -> None:
    name = call.request.mark.name
    if not name or (name not in agent.marks and len(agent.marks) >= _MAX_MARKS):
        wrong = "no name for a mark, or too many of them"
        raise RefusedError(guest_pb2.GUEST_STATUS_INVALID, wrong)
    agent.marks[name] = folders.read_tree(Path(call.folder), _MARK).tree


async def _diff(call: Call, agent: _HasMarks) -> guest_pb2.GuestResult:
    asked = call.request.diff
    if asked.mark and asked.mark not in agent.marks:
        raise RefusedError(guest_pb2.GUEST_STATUS_NOT_FOUND, "no such mark")
    try:
        found = folders.read_tree(Path(call.folder), FolderLimits(asked.max_files, asked.max_bytes))
    except TooLargeError as error:
        raise WorkspaceError(PathFault.TOO_MANY, "") from error
    diff = trees.tree_difference(agent.marks.get(asked.mark, {}), found.tree)
    await call.data(0, diff.SerializeToString())
    return guest_pb2.GuestResult(is_plain=found.is_plain)


FILES: Mapping[str, Operation] = {
    "read": _read,
    "write": _write,
    "list": _list,
    "stat": _stat,
    "delete": _delete,
    "glob": _glob,
    "grep": _grep,
    "walk": _walk,
    "hashes": _hashes,
    "mark": _mark,
    "diff": _diff,
}
"""What does each operation on files."""
