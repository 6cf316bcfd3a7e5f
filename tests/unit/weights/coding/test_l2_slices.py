"""L2 and L2r need the old words of a tile: each rank has those of its own slice, and no others."""

import numpy as np
import pytest

from etude.common.weights.coding.codecs.ids import Codec
from etude.common.weights.coding.container import parse_index
from etude.common.weights.replicas import block_reader
from etude.common.weights.replicas.live_weights import LiveWeights, slice_regions
from etude.common.weights.tensors.changes import changed_places
from etude.common.weights.tensors.schema import Schema, TensorSpec
from etude.common.weights.tensors.tiles import tiling
from etude.common.weights.tensors.words import Words
from etude.trainer.export.delta_packer import Packer, Shard, shard_words

SCHEMA = Schema(
    grid=2,
    tensors=(
        TensorSpec(name="columns", dtype="BF16", shape=(600, 512), split="columns"),
        TensorSpec(name="experts", dtype="BF16", shape=(3, 512, 600), split="rows"),
        TensorSpec(name="rows", dtype="F32", shape=(1024, 300), split="rows"),
    ),
)


def numbers(seed: int) -> list[Words]:
    random = np.random.default_rng(seed)
    values = [
        random.normal(size=s.shape).astype(np.float32).view(np.uint32) for s in SCHEMA.tensors
    ]
    return [
        v if s.dtype == "F32" else (v >> 16).astype(np.uint16)
        for v, s in zip(values, SCHEMA.tensors, strict=True)
    ]


def stepped(words: Words, seed: int) -> Words:
    return words + (np.random.default_rng(seed).random(words.shape) < 0.02).astype(words.dtype)


def part(whole: Words, spec: TensorSpec, rank: int) -> Words:
    axis = -1 if spec.split == "columns" else -2
    halves: list[Words] = np.split(whole, 2, axis=axis)
    return halves[rank]


@pytest.mark.parametrize("codec", [Codec.L2, Codec.L2R])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_decodes_the_tiles_of_its_slice_from_its_own_words(codec: Codec, rank: int) -> None:
    old = numbers(0)
    new = [stepped(words, seed) for seed, words in enumerate(old)]
    packer = Packer(SCHEMA, codec=codec)
    for tensor, spec in enumerate(SCHEMA.tensors):
        before, after, shard = old[tensor].ravel(), new[tensor].ravel(), Shard(0, spec.elements)
        flat = changed_places(before, after)
        block_words = shard_words(after, shard, tiling(spec, SCHEMA.grid))
        packer.add_changes(tensor, flat, before[flat], after[flat], shard, block_words=block_words)
    made = packer.finish().container
    index = parse_index(
        made.data[made.index_offset :][: made.index_length],
        schema=SCHEMA,
        size=made.size,
        index_offset=made.index_offset,
        sha256=made.index_sha256,
        where="test",
    )
    wanted = index.select(block_reader.select_slice(SCHEMA, rank, 2)(index))
    assert set(wanted.codec) == {codec}
    assert 0 < len(wanted) < len(index)
    data = memoryview(made.data)
    blocks = [
        block_reader.stage_block(
            block_reader.VerifiedBlock(row, data[row.offset : row.offset + row.length]),
            SCHEMA,
            where="test",
        )
        for row in wanted
    ]
    own = {
        spec.name: part(words, spec, rank).flatten()
        for spec, words in zip(SCHEMA.tensors, old, strict=True)
    }
    live = LiveWeights(SCHEMA, own, slice_regions(SCHEMA, rank, 2))
    assert live.write(live.prepare(blocks))
    for spec, words in zip(SCHEMA.tensors, new, strict=True):
        assert np.array_equal(own[spec.name], part(words, spec, rank).ravel())
