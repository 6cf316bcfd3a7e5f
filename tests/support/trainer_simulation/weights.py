"""Simulated weights: a vector of bytes that is published by the real protocol."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from etude.common.blobs import Store
from etude.common.weights.protocol import publication
from etude.common.weights.protocol.manifest import Stats
from etude.common.weights.protocol.versions import VersionId
from etude.common.weights.tensors import digest
from etude.common.weights.tensors.digest import Digest
from etude.common.weights.tensors.schema import Schema, TensorSpec
from etude.common.weights.tensors.words import Words
from etude.trainer.export.delta_packer import Packer, Shard
from etude.trainer.export.receipts import PublishBase, RankReceipt, payload_object

SIZE = 4096
CHANGES_PER_STEP = 32

SCHEMA = Schema(grid=1, tensors=(TensorSpec(name="w", dtype="U8", shape=(SIZE,), split="rows"),))


def initial_words() -> Words:
    """The weights before the first step."""
    return np.zeros(SIZE, np.uint8)


def step_words(words: Words, trained: str) -> Words:
    """The weights after a step; the digest of all that was trained selects a few changes."""
    drawn = np.random.default_rng(int(trained[:16], 16))
    changed = words.copy()
    places = drawn.integers(0, SIZE, CHANGES_PER_STEP)
    changed[places] = drawn.integers(0, 256, CHANGES_PER_STEP)
    return changed


class WaitingPayload(NamedTuple):
    """A payload that is encoded and not stored."""

    key: str
    data: bytes


@dataclass(slots=True)
class SimulatedPublisher:
    """Publisher of one rank that keeps a copy of every published state."""

    store: Store
    is_full: bool = False
    """True to publish complete versions only."""
    waiting: dict[VersionId, WaitingPayload] = field(default_factory=dict)
    _known: dict[Digest, Words] = field(default_factory=dict)

    def follow(self, words: Words) -> None:
        """Remember restored weights, which a base may refer to."""
        self._known[digest.scan(words, 0)] = words

    def encode(self, version: VersionId, base: PublishBase | None, words: Words) -> RankReceipt:
        """Encode the words as a learner rank does."""
        old = (
            None if base is None or self.is_full else self._known.get(Digest.parse(base.ref.state))
        )
        shard = Shard(0, SIZE)
        with Packer(SCHEMA, threads=1) as packer:
            if old is None:
                packer.add_complete(0, words, shard)
            else:
                flat = np.flatnonzero(old != words)
                packer.add_changes(
                    tensor=0,
                    flat=flat,
                    old=old[flat],
                    new=words[flat],
                    shard=shard,
                    block_words=lambda _, lo, hi: words[lo:hi],
                )
            packed = packer.finish()
        payload = None
        if base is None:
            self.waiting.clear()
        if packed.container.blocks:
            payload = payload_object(version, 0, packed.container, complete=old is None)
            self.waiting[version] = WaitingPayload(payload.key, packed.container.data)
        self.follow(words)
        return RankReceipt(
            rank=0,
            payload=payload,
            is_complete=old is None,
            schema_sha256=SCHEMA.sha256,
            change=packed.digest.hex(),
            share=digest.scan(words, 0).hex(),
            coverage=digest.ZERO.hex(),
            stats=Stats(**packed.stats._asdict()),
        )

    def upload(self, version: VersionId) -> None:
        """Store an encoded version as a learner rank does."""
        publication.put_schema(self.store, SCHEMA.to_bytes(), SCHEMA.sha256)
        waiting = self.waiting.get(version)
        if waiting is not None:
            self.store.put(waiting.key, waiting.data)
            self.waiting.pop(version, None)
