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
import os
import stat
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from blake3 import blake3
from typing_extensions import override

from etude.agent import patterns
from etude.agent.patterns import FileMatches, GrepQuery
from etude.agent.workspace.protocol import (
    MAX_DEPTH,
    MAX_FILE_BYTES,
    MAX_FILES,
    MAX_HASHED_BYTES,
    ExecResult,
    FileInfo,
    FileKind,
    Originals,
    PathFault,
    Runner,
    Workspace,
    WorkspaceError,
    WorkspaceLostError,
    relative,
    shown,
)

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_CHUNK_BYTES = 1 << 20
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
"""What the policy may cause and put right; every other error is the platform's."""


class _Entry(NamedTuple):
    name: str
    status: os.stat_result


class _Found(NamedTuple):
    path: str
    folder: int
    """Descriptor of the file's folder, open until the walk goes on."""
    size: int


@dataclass(slots=True)
class FolderWorkspace(Workspace):
    """The files under one folder, and a runner that executes commands in it."""

    root: Path
    run: Runner
    originals: Originals = field(default_factory=Originals)
    owner: tuple[int, int] | None = None
    """User and group of what is written, where it is not this process's: the sandbox's."""
    search_limit_s: float = 20.0
    """Longest search; 12,000 files of a standard library take 1.3 s."""

    @override
    async def read(self, path: str) -> bytes:
        with _faults(path), self._parent(path) as (folder, name):
            return _read(folder, name, path)

    @override
    async def write(self, path: str, data: bytes) -> None:
        if len(data) > MAX_FILE_BYTES:
            raise WorkspaceError(PathFault.TOO_LARGE, path)
        with _faults(path), self._parent(path, create=True) as (folder, name):
            _write(folder, name, path, data, self.owner)

    @override
    async def stat(self, path: str) -> FileInfo:
        with _faults(path), self._parent(path) as (folder, name):
            status = os.stat(name or ".", dir_fd=folder, follow_symlinks=False)
            return _info(relative(path), status)

    @override
    async def list(self, path: str) -> Sequence[FileInfo]:
        clean = relative(path)
        prefix = clean and clean + "/"
        with _faults(path), self._folder(clean) as folder:
            entries = _entries(folder, MAX_FILES, path)
            return [_info(prefix + entry.name, entry.status) for entry in entries]

    @override
    async def glob(self, pattern: str) -> Sequence[str]:
        patterns.glob_matcher(pattern)
        paths = await asyncio.to_thread(self._paths, hidden=patterns.names_hidden(pattern))
        return patterns.globbed(pattern, paths)

    @override
    async def grep(self, query: GrepQuery) -> Sequence[FileMatches]:
        matcher = patterns.grep_matcher(query)
        return await asyncio.to_thread(self._grep, matcher, query)

    @override
    async def delete(self, path: str) -> None:
        with _faults(path), self._parent(path) as (folder, name):
            if not name:
                raise WorkspaceError(PathFault.IS_A_FOLDER, path)
            os.unlink(name, dir_fd=folder)

    @override
    async def exec(self, command: str, *, timeout_s: float) -> ExecResult:
        return await self.run(command, timeout_s)

    @override
    async def hashes(self) -> dict[str, str]:
        return await asyncio.to_thread(self._hashes)

    def _paths(self, *, hidden: bool) -> Sequence[str]:
        with _faults(""), self._folder("") as root:
            return _sorted(found.path for found in _Walk(hidden=hidden).files(root, ""))

    def _grep(self, matcher: patterns.Matcher, query: GrepQuery) -> Sequence[FileMatches]:
        start = relative(query.path)
        hits: list[FileMatches] = []
        deadline_s = time.monotonic() + self.search_limit_s
        with _faults(query.path), self._parent(query.path) as (folder, name):
            for found in _Walk(hidden=patterns.wants_hidden(query)).below(folder, name, start):
                if not patterns.is_searched(query, start, found.path, found.size):
                    continue
                if time.monotonic() > deadline_s:
                    raise WorkspaceError(PathFault.TOO_SLOW, query.path)
                data = _read_or_gone(found)
                hit = data and patterns.file_matches(matcher, query, found.path, data)
                hits += [hit] if hit else []
        hits.sort(key=lambda hit: hit.path.encode())
        return patterns.limited(hits, query.limit)

    def _hashes(self) -> dict[str, str]:
        hashes: dict[str, str] = {}
        with _faults(""), self._folder("") as root:
            for found in _Walk(hidden=True).files(root, ""):
                digest = _digest(found)
                if digest is not None:
                    hashes[found.path] = digest
        return {path: hashes[path] for path in _sorted(hashes)}

    @contextlib.contextmanager
    def _parent(self, path: str, *, create: bool = False) -> Iterator[tuple[int, str]]:
        folder_path, _, name = relative(path).rpartition("/")
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
                inner = _enter(folder, name, path, create=create, owner=self.owner)
                os.close(folder)
                folder = inner
            yield folder
        finally:
            os.close(folder)


@dataclass(slots=True, kw_only=True)
class _Walk:
    """One pass over the regular files below a folder, bounded in depth and number."""

    hidden: bool
    entries_left: int = MAX_FILES

    def below(self, folder: int, name: str, path: str) -> Iterator[_Found]:
        """The file with this name, or the files below the folder with this name."""
        status = os.stat(name or ".", dir_fd=folder, follow_symlinks=False)
        if stat.S_ISREG(status.st_mode):
            yield _Found(path, folder, status.st_size)
            return
        inner = _enter(folder, name or ".", path)
        try:
            yield from self.files(inner, path and path + "/")
        finally:
            os.close(inner)

    def files(self, folder: int, prefix: str) -> Iterator[_Found]:
        entries = _entries(folder, self.entries_left, prefix.rstrip("/"))
        self.entries_left -= len(entries)
        for name, status in entries:
            path = prefix + name
            if name.startswith(".") and not self.hidden:
                continue
            if stat.S_ISREG(status.st_mode):
                yield _Found(path, folder, status.st_size)
            elif stat.S_ISDIR(status.st_mode) and path.count("/") < MAX_DEPTH:
                yield from self._inside(folder, name, path)

    def _inside(self, folder: int, name: str, path: str) -> Iterator[_Found]:
        try:
            inner = os.open(name, _FOLDER, dir_fd=folder)
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            return  # gone, exchanged or closed while we walked: as if it were not there
        try:
            yield from self.files(inner, path + "/")
        finally:
            os.close(inner)


@contextlib.contextmanager
def _faults(path: str) -> Iterator[None]:
    """Tell apart what the policy can put right from a broken platform.

    Raises:
        WorkspaceError: the policy's.
        WorkspaceLostError: the platform's.
    """
    try:
        yield
    except OSError as error:
        fault = _FAULTS.get(error.errno or 0)
        if fault is None:
            raise WorkspaceLostError(f"{shown(path)}: {error}") from error
        raise WorkspaceError(fault, shown(path)) from error


def _enter(
    folder: int,
    name: str,
    path: str,
    *,
    create: bool = False,
    owner: tuple[int, int] | None = None,
) -> int:
    try:
        return os.open(name, _FOLDER, dir_fd=folder)
    except FileNotFoundError:
        if not create:
            raise
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o755, dir_fd=folder)
            if owner is not None:
                os.chown(name, *owner, dir_fd=folder, follow_symlinks=False)
        return os.open(name, _FOLDER, dir_fd=folder)
    except NotADirectoryError as error:
        # The kernel answers alike for a link and for a file in the place of a folder.
        if stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            raise WorkspaceError(PathFault.LINK, path) from error
        raise


def _entries(folder: int, limit: int, path: str) -> list[_Entry]:
    """Names of one folder in bytewise order, without those that are no text.

    Raises:
        WorkspaceError: there are more than the limit.
    """
    entries: list[_Entry] = []
    with os.scandir(folder) as names:
        for entry in names:
            if len(entries) >= limit:
                raise WorkspaceError(PathFault.TOO_MANY, path)
            if entry.name.isascii() or _is_text(entry.name):
                with contextlib.suppress(FileNotFoundError):
                    entries.append(_Entry(entry.name, entry.stat(follow_symlinks=False)))
    return sorted(entries, key=lambda entry: entry.name.encode())


def _is_text(name: str) -> bool:
    return not any("\ud800" <= letter <= "\udfff" for letter in name)


def _sorted(paths: Iterable[str]) -> list[str]:
    return sorted(paths, key=str.encode)


def _info(path: str, status: os.stat_result) -> FileInfo:
    if stat.S_ISDIR(status.st_mode):
        return FileInfo(path, FileKind.FOLDER, 0)
    if stat.S_ISREG(status.st_mode):
        return FileInfo(path, FileKind.FILE, status.st_size)
    return FileInfo(path, FileKind.OTHER, 0)


def _check_regular(status: os.stat_result, path: str) -> None:
    mode = status.st_mode
    if stat.S_ISDIR(mode):
        raise WorkspaceError(PathFault.IS_A_FOLDER, path)
    if stat.S_ISLNK(mode):
        raise WorkspaceError(PathFault.LINK, path)
    if not stat.S_ISREG(mode):
        raise WorkspaceError(PathFault.NOT_A_FILE, path)


@contextlib.contextmanager
def _opened(folder: int, name: str, path: str) -> Iterator[int]:
    # Looked at before opening, so that no device is touched, and again after, as it may change.
    _check_regular(os.stat(name or ".", dir_fd=folder, follow_symlinks=False), path)
    descriptor = os.open(name, _READ, dir_fd=folder)
    try:
        _check_regular(os.fstat(descriptor), path)
        yield descriptor
    finally:
        os.close(descriptor)


def _read(folder: int, name: str, path: str) -> bytes:
    with _opened(folder, name, path) as descriptor:
        size = os.fstat(descriptor).st_size
        data = b"".join(_chunks(descriptor, size)) if size <= MAX_FILE_BYTES else None
    if data is None or len(data) > MAX_FILE_BYTES:
        raise WorkspaceError(PathFault.TOO_LARGE, path)
    return data


def _chunks(descriptor: int, size: int) -> Iterator[bytes]:
    """The file's bytes, at most one chunk past the limit while it grows."""
    total = 0
    while total <= MAX_FILE_BYTES and (chunk := os.read(descriptor, max(size - total, 0) + 1)):
        total += len(chunk)
        yield chunk


def _read_or_gone(found: _Found) -> bytes | None:
    """A file's content, or nothing where it changed under the walk."""
    try:
        return _read(found.folder, found.path.rpartition("/")[2], found.path)
    except (FileNotFoundError, PermissionError, WorkspaceError):
        return None


def _digest(found: _Found) -> str | None:
    if found.size > MAX_HASHED_BYTES:
        return f"oversized-{found.size}"
    try:
        with _opened(found.folder, found.path.rpartition("/")[2], found.path) as descriptor:
            hasher, size = blake3(), 0
            while size <= MAX_HASHED_BYTES and (chunk := os.read(descriptor, _CHUNK_BYTES)):
                hasher.update(chunk)
                size += len(chunk)
    except (FileNotFoundError, PermissionError, WorkspaceError):
        return None
    return hasher.hexdigest()


def _write(folder: int, name: str, path: str, data: bytes, owner: tuple[int, int] | None) -> None:
    """Replace or create a file in one step, keeping the mode of the one that was there."""
    mode = 0o644
    with contextlib.suppress(FileNotFoundError):
        status = os.stat(name or ".", dir_fd=folder, follow_symlinks=False)
        _check_regular(status, path)
        mode = stat.S_IMODE(status.st_mode) & 0o777
    temporary = f".etude-{uuid.uuid4().hex}"
    descriptor = os.open(temporary, _CREATE, mode, dir_fd=folder)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            os.fchmod(descriptor, mode)
            if owner is not None:
                os.fchown(descriptor, *owner)
        os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=folder)
        raise
