"""A way over several versions is staged as one complete version: tile by tile, as a keyframe is."""

from pathlib import Path

import numpy as np
from tests.support.weights.publishing import TrainedPolicy

from etude.common import weights
from etude.common.blobs import MemoryStore
from etude.common.weights import VersionId, plan_path
from etude.common.weights.coding.codecs.ids import Codec
from etude.common.weights.replicas import staged_file
from etude.common.weights.replicas.live_weights import LiveWeights, identity_regions
from etude.common.weights.replicas.mirror import Mirror
from etude.common.weights.tensors.schema import Schema, TensorSpec
from etude.common.weights.tensors.tiles import TILE_ELEMENTS, tiling
from etude.common.weights.tensors.words import word_type
from etude.inference.updates.staging import stage_path_end

SCHEMA = Schema(
    grid=2,
    tensors=(
        TensorSpec(name="columns", dtype="BF16", shape=(1000, 1024), split="columns"),
        TensorSpec(name="none", dtype="F32", shape=(0, 7), split="rows"),
        TensorSpec(name="planes", dtype="F32", shape=(3, 300, 64), split="rows"),
        TensorSpec(name="rows", dtype="BF16", shape=(1024, 1024), split="rows"),
        TensorSpec(name="vector", dtype="F32", shape=(77,), split="rows"),
    ),
)


def staged_end(
    folder: Path, tensors: set[int]
) -> tuple[TrainedPolicy, list[staged_file.StagedBlock]]:
    store, policy = MemoryStore(), TrainedPolicy(SCHEMA)
    weights.claim_epoch(store, holder="t", parent=None, reason="start")
    policy.publish(store, 0, complete=True)
    for number in (1, 2):
        policy.step(0.01)
        policy.publish(store, number)
    edges = plan_path(store, None, VersionId(1, 2))
    assert len(edges) == 3
    stage_path_end(edges, Mirror(store, folder / "copy"), folder / "staged", tensors)
    return policy, staged_file.read_staged(folder / "staged")


def test_the_end_of_a_way_is_there_word_for_word(tmp_path: Path) -> None:
    policy, blocks = staged_end(tmp_path, set(range(len(SCHEMA.tensors))))
    words = {spec.name: np.zeros(spec.elements, word_type(spec.dtype)) for spec in SCHEMA.tensors}
    live = LiveWeights(SCHEMA, words, identity_regions(SCHEMA))
    assert live.write(live.prepare(blocks))
    for name, found in words.items():
        assert np.array_equal(found, policy.words[name])


def test_every_tile_is_a_block_so_that_none_is_larger_than_what_is_written_at_a_time(
    tmp_path: Path,
) -> None:
    _, blocks = staged_end(tmp_path, set(range(len(SCHEMA.tensors))))
    places = [(block.tensor, block.tile) for block in blocks]
    tiles = {
        n: tiling(spec, SCHEMA.grid).tiles for n, spec in enumerate(SCHEMA.tensors) if spec.elements
    }
    assert places == [(n, tile) for n, count in tiles.items() for tile in range(count)]
    assert tiles[0] > 1
    assert all(block.codec is Codec.DENSE for block in blocks)
    assert all(block.num_changed <= TILE_ELEMENTS for block in blocks)


def test_what_nobody_here_holds_is_not_staged(tmp_path: Path) -> None:
    _, blocks = staged_end(tmp_path, {0, 3})
    assert {block.tensor for block in blocks} == {0, 3}
