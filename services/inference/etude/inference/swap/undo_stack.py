"""Undo stack: older versions that can be restored without reading the store."""

from dataclasses import dataclass, field
from typing import NamedTuple

from etude.common.weights import VersionRef


class UndoEntry(NamedTuple):
    """A version whose words can be restored from memory."""

    ref: VersionRef
    num_bytes: int
    """Memory that its old words take on all ranks."""


@dataclass(slots=True)
class UndoStack:
    """Versions before the live one whose words the ranks still hold."""

    entries: list[UndoEntry] = field(default_factory=list)
    """Oldest first."""

    @property
    def depth(self) -> int:
        """Number of versions that can be undone."""
        return len(self.entries)

    @property
    def num_bytes(self) -> int:
        """Memory that all ranks hold for undoing."""
        return sum(older.num_bytes for older in self.entries)

    @property
    def newest(self) -> VersionRef | None:
        """Version that undoing the last swap restores; None if it cannot be undone."""
        return self.entries[-1].ref if self.entries else None

    def can_restore(self, state: str) -> bool:
        """True if words with this state digest can be restored."""
        return any(older.ref.state == state for older in self.entries)

    def trim(self, newest: int) -> None:
        """Drop all but the newest entries."""
        self.entries = self.entries[len(self.entries) - newest :]

    def push(self, ref: VersionRef, num_bytes: int) -> None:
        """Add the version that was live until now."""
        self.entries.append(UndoEntry(ref, num_bytes))

    def pop(self) -> VersionRef:
        """Remove and return the version that an undo has restored."""
        return self.entries.pop().ref
