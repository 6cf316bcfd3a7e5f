"""Weights without a model: a vector of bytes that is published by the real protocol."""

from dataclasses import dataclass, field

import numpy as np

from etude.common.blobs import Store
from etude.common.weights.coding.packing import Packer, Shard
from etude.common.weights.protocol import publication
from etude.common.weights.protocol.manifest import Stats
from etude.common.weights.protocol.versions import VersionId
from etude.common.weights.tensors import digest
from etude.common.weights.tensors.digest import Digest
from etude.common.weights.tensors.schema import Schema, TensorSpec
from etude.common.weights.tensors.words import Words
from etude.trainer.receipts import Base, Receipt, stored_payload

SIZE = 4096
CHANGES_PER_STEP = 32

SCHEMA = Schema(grid=1, tensors=(TensorSpec(name="w", dtype="U8", shape=(SIZE,), split="rows"),))


def initial() -> Words:
    """Before the first step."""
    return np.zeros(SIZE, np.uint8)


def after_step(words: Words, trained: str) -> Words:
    """The weights after a step, given the digest of all that was trained; few of them change."""
    drawn = np.random.default_rng(int(trained[:16], 16))
    changed = words.copy()
    places = drawn.integers(0, SIZE, CHANGES_PER_STEP)
    changed[places] = drawn.integers(0, 256, CHANGES_PER_STEP)
    return changed


@dataclass(slots=True)
class SimulatedPublisher:
    """The publisher of one rank, which keeps a copy of every state that it published."""

    store: Store
    is_full: bool = False
    """Publishes everything each time."""
    _known: dict[Digest, Words] = field(default_factory=dict)

    def follow(self, words: Words) -> None:
        """Remember weights that were restored: a version may be of them."""
        self._known[digest.scan(words, 0)] = words

    def publish(self, version: VersionId, base: Base | None, words: Words) -> Receipt:
        """As a rank of the learner does it."""
        old = (
            None if base is None or self.is_full else self._known.get(Digest.parse(base.ref.state))
        )
        shard = Shard(0, SIZE)
        with Packer(SCHEMA, threads=1) as packer:
            if old is None:
                packer.add_complete(0, words, shard)
            else:
                flat = np.flatnonzero(old != words)
                new = words[flat]
                packer.add_changes(
                    *(0, flat, old[flat], new, shard),
                    block_words=lambda _, lo, hi: words[lo:hi],
                )
            packed = packer.finish()
        publication.put_schema(self.store, SCHEMA.to_bytes(), SCHEMA.sha256)
        payload = None
        if packed.container.blocks:
            payload = stored_payload(self.store, version, 0, packed.container, complete=old is None)
        self.follow(words)
        return Receipt(
            rank=0,
            payload=payload,
            is_complete=old is None,
            schema_sha256=SCHEMA.sha256,
            change=packed.digest.hex(),
            share=digest.scan(words, 0).hex(),
            stats=Stats(**packed.stats._asdict()),
        )
