"""Folders of a lease in a snapshot: copied together, put back together."""

import sys
from collections.abc import Mapping
from pathlib import Path

from blake3 import blake3

from etude.common.errors import CorruptError
from etude.envserver import copies, folders
from etude.envserver.drivers.base import Saved
from etude.envserver.folders import Limits, Owner

_UNLIMITED = Limits(max_files=sys.maxsize, max_bytes=sys.maxsize)
"""What was saved once kept to its limits then."""

Parts = Mapping[str, Owner]
"""Names of folders of a lease, and whom they belong to there."""


def save(lease: Path, parts: Parts, target: Path, limits: Limits) -> Saved:
    """Copy those folders that there are.

    Args:
        lease: the lease's folder.
        parts: of it.
        target: an empty folder. What is in it is the node's own, and nothing of a lease's.
        limits: of all together.

    Raises:
        TooLargeError: there is more than the limits allow.
        OSError: something cannot be read or written.
    """
    num_bytes, digest = 0, blake3()
    for name in parts:
        if (lease / name).exists():
            left = limits._replace(max_bytes=limits.max_bytes - num_bytes)
            owner = folders.current_owner()
            copied = copies.copy(lease / name, target / name, limits=left, owner=owner)
            num_bytes += copied.num_bytes
            digest.update(f"{name} {copied.digest}\n".encode())
    return Saved(num_bytes=num_bytes, digest=digest.hexdigest())


def prepare(source: Path, parts: Parts, lease: Path, saved: Saved) -> None:
    """Put a copy of what was saved beside those folders; replace() does the rest.

    Raises:
        CorruptError: it is something else.
        OSError: something cannot be read or written.
    """
    digest = blake3()
    for name, owner in parts.items():
        partial = _beside(lease, name, "partial")
        folders.remove(partial)
        if (source / name).exists():
            copied = copies.copy(source / name, partial, limits=_UNLIMITED, owner=owner)
            digest.update(f"{name} {copied.digest}\n".encode())
    if digest.hexdigest() != saved.digest:
        for name in parts:
            folders.remove(_beside(lease, name, "partial"))
        raise CorruptError(f"{source} is not what was saved")


def replace(parts: Parts, lease: Path) -> None:
    """Make what was prepared the folders, in place of those that there are."""
    for name in parts:
        former, partial = (_beside(lease, name, end) for end in ("former", "partial"))
        folders.remove(former)
        if (lease / name).exists():
            (lease / name).rename(former)
        if partial.exists():
            partial.rename(lease / name)
    for name in parts:
        folders.remove(_beside(lease, name, "former"))


def _beside(lease: Path, name: str, end: str) -> Path:
    return lease / f"{name}.{end}"
