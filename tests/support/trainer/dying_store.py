"""A store whose controller dies before a write to its checkpoints."""

from collections.abc import Sequence
from dataclasses import dataclass

from typing_extensions import Buffer, override

from etude.common.blobs import MemoryStore


class KilledError(ConnectionError):
    """Nothing that this controller does afterwards counts."""


@dataclass
class DyingStore(MemoryStore):
    """Takes a number of writes to checkpoints; its controller dies before the next one."""

    writes_left: int = -1
    """-1 for any number."""
    stays_dead: bool = True
    """False to refuse that one write alone."""
    is_dead: bool = False

    def _count(self, key: str) -> None:
        is_last = key.startswith("checkpoints/") and self.writes_left == 0
        if key.startswith("checkpoints/"):
            self.writes_left -= 1
        self.is_dead = self.is_dead or (is_last and self.stays_dead)
        if is_last or self.is_dead:
            raise KilledError(key)

    def revive(self) -> None:
        self.writes_left, self.is_dead = -1, False

    @override
    def put(self, key: str, data: Buffer) -> None:
        self._count(key)
        MemoryStore.put(self, key, data)

    @override
    def create(self, key: str, data: bytes) -> None:
        self._count(key)
        MemoryStore.create(self, key, data)

    @override
    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._count(key)
        MemoryStore.delete(self, keys)
