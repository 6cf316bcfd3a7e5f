"""The chaos model as the weights protocol sees it: schema, shards, receipts."""

from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from tests.harness.chaos.model import TENSORS, Bits

from etude.common.blobs import Store
from etude.common.weights.protocol.manifest import Stats
from etude.common.weights.protocol.versions import VersionId
from etude.common.weights.tensors import digest
from etude.common.weights.tensors.digest import ZERO
from etude.common.weights.tensors.schema import Schema, TensorSpec
from etude.common.weights.tensors.tiles import tiling
from etude.common.weights.tensors.words import Words
from etude.trainer.export.delta_packer import Packer, Shard, shard_words
from etude.trainer.export.receipts import RankReceipt, payload_object

RANKS = 2

SCHEMA = Schema(
    grid=8,
    tensors=tuple(
        TensorSpec(name=name, dtype=each.dtype, shape=each.shape, split=each.split)
        for name, each in TENSORS.items()
    ),
)


class Step(NamedTuple):
    """From the bits of the base to the bits of a version."""

    old: Bits | None
    """None: the version is complete."""
    new: Bits


def receipts(store: Store, version: VersionId, step: Step) -> list[RankReceipt]:
    """What all ranks publish of a version, each from its shards."""
    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(lambda rank: _receipt(store, version, step, rank), range(RANKS)))


def _receipt(store: Store, version: VersionId, step: Step, rank: int) -> RankReceipt:
    share = ZERO
    is_complete = step.old is None
    with Packer(SCHEMA, threads=1) as packer:
        for place, spec in enumerate(SCHEMA.tensors):
            shard = _shard(spec, rank)
            words = step.new[spec.name][shard.start : shard.stop]
            lanes = spec.lanes // spec.elements
            share = share.plus(digest.scan(words, SCHEMA.offsets[place] + shard.start * lanes))
            if step.old is None:
                packer.add_complete(place, words, shard)
            else:
                _add_changes(packer, place, step.old[spec.name], words, shard)
        packed = packer.finish()
    payload = None
    if packed.container.blocks:
        payload = payload_object(version, rank, packed.container, complete=is_complete)
        store.put(payload.key, packed.container.data)
    return RankReceipt(
        rank=rank,
        payload=payload,
        is_complete=is_complete,
        schema_sha256=SCHEMA.sha256,
        change=packed.digest.hex(),
        share=share.hex(),
        coverage=ZERO.hex(),
        stats=Stats(**packed.stats._asdict()),
    )


def _shard(spec: TensorSpec, rank: int) -> Shard:
    """Rows as FSDP cuts them: the first rank has one more where they are odd."""
    rows = spec.shape[0]
    width = spec.elements // rows
    half = -(-rows // RANKS)
    return Shard(min(rank * half, rows) * width, min((rank + 1) * half, rows) * width)


def _add_changes(packer: Packer, place: int, before: Words, words: Words, shard: Shard) -> None:
    old = before[shard.start : shard.stop]
    at = np.flatnonzero(old != words)
    cut = tiling(SCHEMA.tensors[place], SCHEMA.grid)
    packer.add_changes(
        *(place, at + shard.start, old[at], words[at], shard),
        block_words=shard_words(words, shard, cut),
    )
