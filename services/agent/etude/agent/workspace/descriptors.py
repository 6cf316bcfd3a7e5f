"""File operations relative to an open folder, without following links."""

import contextlib
import os
import stat
import uuid
from collections.abc import Iterator
from typing import NamedTuple

from etude.agent.workspace.interface import (
    MAX_FILE_BYTES,
    FileInfo,
    FileKind,
    PathFault,
    WorkspaceError,
)

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_MIN_READ_BYTES = 16 << 10
"""Chunk size for files that report 0 bytes and are not empty."""


class FolderEntry(NamedTuple):
    """One name of a folder, when it was listed."""

    name: str
    status: os.stat_result


def enter(
    folder: int,
    name: str,
    path: str,
    *,
    create: bool = False,
    owner: tuple[int, int] | None = None,
) -> int:
    """Open a folder in an open folder; create it if asked to.

    Raises:
        WorkspaceError: a link is in its place.
        FileNotFoundError: it does not exist.
        NotADirectoryError: a file is in its place.
    """
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


def list_entries(folder: int, limit: int, path: str) -> list[FolderEntry]:
    """Names of one folder in bytewise order, without those that are not text.

    Raises:
        WorkspaceError: there are more than the limit.
    """
    found: list[FolderEntry] = []
    with os.scandir(folder) as names:
        for entry in names:
            if len(found) >= limit:
                raise WorkspaceError(PathFault.TOO_MANY, path)
            if entry.name.isascii() or _is_text(entry.name):
                with contextlib.suppress(FileNotFoundError):
                    found.append(FolderEntry(entry.name, entry.stat(follow_symlinks=False)))
    return sorted(found, key=lambda entry: entry.name.encode())


def _is_text(name: str) -> bool:
    return not any("\ud800" <= letter <= "\udfff" for letter in name)


def file_info(path: str, status: os.stat_result) -> FileInfo:
    """FileInfo of one name."""
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
def _open_regular(folder: int, name: str, path: str) -> Iterator[int]:
    # Looked at before opening, so that no device is touched, and again after, as it may change.
    _check_regular(os.stat(name or ".", dir_fd=folder, follow_symlinks=False), path)
    descriptor = os.open(name, _READ, dir_fd=folder)
    try:
        _check_regular(os.fstat(descriptor), path)
        yield descriptor
    finally:
        os.close(descriptor)


def read(folder: int, name: str, path: str) -> bytes:
    """The content of one regular file.

    Raises:
        WorkspaceError: it is not a regular file, or too large.
    """
    with _open_regular(folder, name, path) as descriptor:
        size = os.fstat(descriptor).st_size
        data = b"".join(_chunks(descriptor, size)) if size <= MAX_FILE_BYTES else None
    if data is None or len(data) > MAX_FILE_BYTES:
        raise WorkspaceError(PathFault.TOO_LARGE, path)
    return data


def _chunks(descriptor: int, size: int) -> Iterator[bytes]:
    """The file's bytes, at most one chunk past the limit while it grows."""
    total = 0
    while total <= MAX_FILE_BYTES:
        chunk = os.read(descriptor, max(size - total + 1, _MIN_READ_BYTES))
        if not chunk:
            return
        total += len(chunk)
        yield chunk


def write(folder: int, name: str, path: str, data: bytes, owner: tuple[int, int] | None) -> None:
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
