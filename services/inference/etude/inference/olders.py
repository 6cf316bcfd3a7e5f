"""Which versions can be taken back to without reading the store."""

from dataclasses import dataclass, field
from typing import NamedTuple

from etude.common.weights import VersionRef


class Older(NamedTuple):
    """A version whose words can be restored from memory."""

    ref: VersionRef
    num_bytes: int
    """What restoring it takes, on all ranks."""


@dataclass(slots=True)
class Olders:
    """What the ranks hold of the versions before the live one, as a stack."""

    held: list[Older] = field(default_factory=list)
    """Oldest first."""

    @property
    def depth(self) -> int:
        """How many versions can be taken back."""
        return len(self.held)

    @property
    def num_bytes(self) -> int:
        """Memory that all ranks hold for that."""
        return sum(older.num_bytes for older in self.held)

    @property
    def newest(self) -> VersionRef | None:
        """What undoing the last swap leads back to; None where nothing does."""
        return self.held[-1].ref if self.held else None

    def can_restore(self, state: str) -> bool:
        """Whether words with this state digest can be restored."""
        return any(older.ref.state == state for older in self.held)

    def keep(self, newest: int) -> None:
        """Forget all but the newest few."""
        self.held = self.held[len(self.held) - newest :]

    def push(self, ref: VersionRef, num_bytes: int) -> None:
        """Remember what was live until now."""
        self.held.append(Older(ref, num_bytes))

    def pop(self) -> VersionRef:
        """The version that one more undo has restored."""
        return self.held.pop().ref
