"""Writer of one rank's state: copied to memory at a step, and stored during the next steps."""

import threading
from collections.abc import Mapping
from typing import NamedTuple

from blake3 import blake3
from pydantic import JsonValue
from torch import Tensor

from etude.common.blobs import Store
from etude.common.checkpoints.manifest import CheckpointObject
from etude.common.errors import WrongStateError
from etude.common.weights.protocol import records
from etude.trainer.learner.checkpoint.index import RankIndex, StoredShard, index_key, part_key
from etude.trainer.learner.checkpoint.shard_memory import ShardMemory
from etude.trainer.model.fsdp import RankGroup
from etude.trainer.model.shard_runs import is_first_replica

PART_BYTES = 256 << 20
"""Size of an object; each is one write, which is repeated as a whole if it fails."""

BLOCK_BYTES = 4 << 20
"""Bytes under one digest: what a reader of a few elements reads at least."""


class _StateCopy(NamedTuple):
    """State of a step in memory."""

    prefix: str
    """Below which it is to be stored."""
    memory: ShardMemory
    state: dict[str, JsonValue]


class StateWriter:
    """Stores what this rank has of a state. At most one copy is in memory at any time."""

    def __init__(
        self, ranks: RankGroup, *, part_bytes: int = PART_BYTES, block_bytes: int = BLOCK_BYTES
    ) -> None:
        self._ranks = ranks
        self._part_bytes = part_bytes
        self._block_bytes = block_bytes
        self._copy: _StateCopy | None = None
        self._is_replaced = threading.Event()
        """Set while a new copy waits for the memory of the one that is being written."""
        self._memory_lock = threading.Lock()

    def copy_state(
        self, prefix: str, tensors: Mapping[str, Tensor], state: dict[str, JsonValue]
    ) -> None:
        """Copy a state to memory, for a write below prefix alone.

        Of ranks that hold the same shard, the first one copies it.
        A copy that is still being written is given up.
        """
        is_first = self._ranks.is_first
        held = {n: t for n, t in tensors.items() if is_first_replica(t, is_first_rank=is_first)}
        self._is_replaced.set()
        with self._memory_lock:
            self._is_replaced.clear()
            self._copy = None
            memory = ShardMemory.allocate(held)
            memory.copy_from(held)
            self._copy = _StateCopy(prefix, memory, state)

    def write_copy(self, store: Store, prefix: str) -> list[CheckpointObject]:
        """Store the copy that was made for prefix, its index last, and free its memory.

        It may run in a thread of its own. A write that failed may be repeated; one that comes after
        a copy for another prefix, late or again, is refused.

        Returns:
            Every object written, with the size and digest that it must have.

        Raises:
            InvalidFieldError: the index is larger than readers take.
            StoreError: the store failed.
            WrongStateError: there is no copy, or a newer one was made meanwhile.
        """
        with self._memory_lock:
            if self._copy is None:
                raise WrongStateError("no state was copied since the last one was written")
            if self._copy.prefix != prefix:
                raise WrongStateError(f"{prefix} is not written: the copy is {self._copy.prefix}'s")
            _, memory, state = self._copy
            written: list[CheckpointObject] = []
            data = memory.data.numpy().data
            for part, start in enumerate(range(0, len(data), self._part_bytes)):
                key = part_key(prefix, self._ranks.rank, part)
                written.append(
                    self._store_object(store, key, data[start : start + self._part_bytes])
                )
            index = records.to_bytes(self._index(memory.shards, data, state))
            written.append(self._store_object(store, index_key(prefix, self._ranks.rank), index))
            self._copy = None
        return written

    def _store_object(self, store: Store, key: str, data: memoryview | bytes) -> CheckpointObject:
        """Store an object, unless the copy is replaced.

        Raises:
            WrongStateError: a newer copy waits for the memory.
        """
        if self._is_replaced.is_set():
            raise WrongStateError(f"{key} is not written: a newer state is copied")
        store.put(key, data)
        return CheckpointObject(key=key, size=len(data), blake3=blake3(data).hexdigest())

    def _index(
        self, shards: tuple[StoredShard, ...], data: memoryview, state: dict[str, JsonValue]
    ) -> RankIndex:
        blocks = range(0, len(data), self._block_bytes)
        return RankIndex(
            rank=self._ranks.rank,
            ranks=self._ranks.size,
            size=len(data),
            part_bytes=self._part_bytes,
            block_bytes=self._block_bytes,
            digests=tuple(blake3(data[i : i + self._block_bytes]).hexdigest() for i in blocks),
            shards=shards,
            state=state,
        )
