"""Atomic file writes: a temporary file, renamed over the target."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def replacing(path: Path, *, fsync: bool = False, mode: int | None = None) -> Iterator[BinaryIO]:
    """A file to write, which replaces the path when the block ends; an error leaves the old one.

    Args:
        path: of the file; readers see the old content or the new one, never a part.
        fsync: flush content and name to the disk. Needed only where a lost file after a crash of
            the machine would be worse than a slow write; a killed process loses nothing without.
        mode: permission bits of a new file.
    """
    partial = partial_path(path)
    try:
        with partial.open("wb") as file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            yield file
            if fsync:
                file.flush()
                os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    if fsync:
        sync_folder(path.parent)


def write_bytes(path: Path, data: bytes, *, fsync: bool = False, mode: int | None = None) -> None:
    """Replace a file's content atomically; see replacing()."""
    with replacing(path, fsync=fsync, mode=mode) as file:
        file.write(data)


def write_text(path: Path, text: str, *, fsync: bool = False, mode: int | None = None) -> None:
    """Replace a file's content by UTF-8 text atomically; see replacing()."""
    write_bytes(path, text.encode(), fsync=fsync, mode=mode)


def partial_path(path: Path) -> Path:
    """Path of the temporary file of a write, which a killed process leaves behind."""
    return path.with_name(f"{path.name}.partial")


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
