"""Accesses of a command, as its driver saw them."""

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple


class AccessKind(StrEnum):
    """Kind of an access."""

    READ = "read"
    """Told only of paths that matter to tests, history and caches."""
    WRITTEN = "written"
    DELETED = "deleted"
    STARTED = "started"
    """A program ran."""


class Access(NamedTuple):
    """One file that a command touched, or one program that it ran."""

    kind: AccessKind
    path: str
    """Absolute; for a program its name."""


class AccessReport(NamedTuple):
    """Accesses of one command."""

    accesses: Sequence[Access] = ()
    is_complete: bool = False
    """False where some may be missing."""


NO_REPORT = AccessReport()
"""Of a driver that sees no accesses."""
