"""A store at whose writes a process can be killed, before or after they take effect."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from typing_extensions import Buffer, override

from etude.common.blobs import MemoryStore


class KilledError(BaseException):
    """Stands for kill -9: nothing of ours handles it."""


@dataclass(slots=True)
class KillPoint:
    """Counts the writes of all stores that share it."""

    at: int
    """Number of the write that is the last one; 0 for none."""
    takes_effect: bool
    num_writes: int = 0
    is_dead: bool = False

    def reach(self) -> bool:
        """Count a write; return whether the process dies at it.

        Raises:
            KilledError: it is dead.
        """
        if self.is_dead:
            raise KilledError
        self.num_writes += 1
        self.is_dead = self.num_writes == self.at
        return self.is_dead


@dataclass
class KilledStore(MemoryStore):
    """Raises KilledError at one write, and at all that come after it."""

    point: KillPoint = field(default_factory=lambda: KillPoint(at=0, takes_effect=False))

    @override
    def put(self, key: str, data: Buffer) -> None:
        dies = self.point.reach()
        if not dies or self.point.takes_effect:
            super().put(key, data)
        if dies:
            raise KilledError

    @override
    def create(self, key: str, data: bytes) -> None:
        dies = self.point.reach()
        if not dies or self.point.takes_effect:
            super().create(key, data)
        if dies:
            raise KilledError

    @override
    def delete(self, keys: Sequence[str]) -> None:
        dies = self.point.reach()
        if not dies or self.point.takes_effect:
            super().delete(keys)
        if dies:
            raise KilledError
