"""Snapshots of a lease's folders: copied together, restored together."""

import sys
from collections.abc import Mapping
from pathlib import Path

from blake3 import blake3

from etude.agent.workspace import notes
from etude.common.errors import CorruptError
from etude.envserver.drivers.base import SavedSandbox
from etude.envserver.storage import copies, folders
from etude.envserver.storage.folders import FolderLimits, Owner, TooLargeError

_UNLIMITED = FolderLimits(max_files=sys.maxsize, max_bytes=sys.maxsize)
"""For restores: a snapshot has been within its limits when it was saved."""

_MAIN_DIGITS = 64

FolderOwners = Mapping[str, Owner]
"""Folders of a lease, by name, and their owners there."""


def save(lease: Path, parts: FolderOwners, target: Path, limits: FolderLimits) -> SavedSandbox:
    """Copy the folders that exist.

    Raises:
        TooLargeError: the limits are exceeded.
    """
    num_bytes, digest = 0, blake3()
    for name in parts:
        if (lease / name).exists():
            left = limits._replace(max_bytes=limits.max_bytes - num_bytes)
            owner = folders.current_owner()
            copied = copies.copy_folder(lease / name, target / name, limits=left, owner=owner)
            num_bytes += copied.num_bytes
            digest.update(f"{name} {copied.digest}\n".encode())
    return SavedSandbox(num_bytes=num_bytes, digest=digest.hexdigest())


def prepare(source: Path, parts: FolderOwners, lease: Path, saved: SavedSandbox) -> None:
    """Copy a snapshot next to the present folders; replace() activates it.

    Raises:
        CorruptError: it is not what was saved.
    """
    digest = blake3()
    for name, owner in parts.items():
        partial = _sibling(lease, name, "partial")
        folders.remove_folder(partial)
        if (source / name).exists():
            copied = copies.copy_folder(source / name, partial, limits=_UNLIMITED, owner=owner)
            digest.update(f"{name} {copied.digest}\n".encode())
    if digest.hexdigest() != saved.digest:
        for name in parts:
            folders.remove_folder(_sibling(lease, name, "partial"))
        raise CorruptError(f"{source} is not what was saved")


def replace(parts: FolderOwners, lease: Path) -> None:
    """Replace the present folders by the prepared ones."""
    for name in parts:
        former, partial = (_sibling(lease, name, end) for end in ("former", "partial"))
        folders.remove_folder(former)
        if (lease / name).exists():
            (lease / name).rename(former)
        if partial.exists():
            partial.rename(lease / name)
    for name in parts:
        folders.remove_folder(_sibling(lease, name, "former"))


def _sibling(lease: Path, name: str, end: str) -> Path:
    return lease / f"{name}.{end}"


def save_notes(main: SavedSandbox, lease: Path, target: Path, limits: FolderLimits) -> SavedSandbox:
    """Add the tools' notes to a snapshot whose main part is in its folder.

    Raises:
        TooLargeError: the limits of both are exceeded.
    """
    if main.num_bytes > limits.max_bytes:
        raise TooLargeError(f"the environment takes {main.num_bytes} bytes")
    left = limits._replace(max_bytes=limits.max_bytes - main.num_bytes)
    noted = save(lease, _notes(), target, left)
    return SavedSandbox(
        num_bytes=main.num_bytes + noted.num_bytes, digest=main.digest + noted.digest
    )


def main_digest(saved: SavedSandbox) -> str:
    """Digest of a snapshot's main part; that of the notes follows it."""
    return saved.digest[:_MAIN_DIGITS]


def prepare_notes(source: Path, lease: Path, saved: SavedSandbox) -> None:
    """Copy a snapshot's notes next to a lease's; see prepare()."""
    prepare(source, _notes(), lease, SavedSandbox(num_bytes=0, digest=saved.digest[_MAIN_DIGITS:]))


def replace_notes(lease: Path) -> None:
    """Make the prepared notes the lease's."""
    replace(_notes(), lease)


def _notes() -> FolderOwners:
    return {notes.FOLDER: folders.current_owner()}
