"""Folded deltas lead from the first version to the last, word for word."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.weights.publishing import TrainedPolicy

from etude.common import weights
from etude.common.blobs import MemoryStore
from etude.common.weights import VersionId, plan_path
from etude.common.weights.coding.codecs.ids import Codec
from etude.common.weights.replicas import block_reader, staged_file
from etude.common.weights.replicas.delta_folding import UnfoldableError, fold_deltas
from etude.common.weights.replicas.live_weights import LiveWeights, identity_regions
from etude.common.weights.replicas.staged_file import StagedBlock
from etude.common.weights.tensors.schema import Schema, TensorSpec

SCHEMA = Schema(
    grid=2,
    tensors=(
        TensorSpec(name="columns", dtype="BF16", shape=(64, 60), split="columns"),
        TensorSpec(name="plain", dtype="U8", shape=(90,), split="rows"),
        TensorSpec(name="rows", dtype="F32", shape=(50, 3), split="rows"),
    ),
)


def publish(shares: list[float], codec: Codec) -> tuple[TrainedPolicy, MemoryStore]:
    """A complete version, and one delta for each share of elements that change."""
    store, policy = MemoryStore(), TrainedPolicy(SCHEMA, codec=codec)
    weights.claim_epoch(store, holder="t", parent=None, reason="start")
    policy.publish(store, 0, complete=True)
    for number, share in enumerate(shares, 1):
        policy.step(share)
        policy.publish(store, number)
    return policy, store


def read_deltas(store: MemoryStore, last: int, folder: Path) -> list[list[StagedBlock]]:
    path = folder / "staged"
    found = []
    live = weights.read_manifest(store, VersionId(1, 0)).ref
    for edge in plan_path(store, live, VersionId(1, last)):
        block_reader.stage(store, edge, SCHEMA, path)
        found.append(staged_file.read_staged(path))
    return found


@given(
    st.lists(st.sampled_from([0.0, 0.01, 0.3, 0.9, 1.0]), min_size=1, max_size=4),
    st.sampled_from([Codec.L1, Codec.DENSE, Codec.DENSE_DELTA, Codec.XOR_ZSTD]),
)
@settings(max_examples=40)
def test_folded_deltas_lead_to_the_last_version(
    tmp_path_factory: pytest.TempPathFactory, shares: list[float], codec: Codec
) -> None:
    policy, store = publish(shares, codec)
    deltas = read_deltas(store, len(shares), tmp_path_factory.mktemp("fold"))
    words = {name: each.copy() for name, each in policy.published[VersionId(1, 0)].items()}
    live = LiveWeights(SCHEMA, words, identity_regions(SCHEMA))
    assert live.write(live.prepare(fold_deltas(deltas, SCHEMA)))
    for name, found in words.items():
        assert np.array_equal(found, policy.words[name])


def test_what_comes_back_is_no_change(tmp_path: Path) -> None:
    policy, store = publish([], Codec.L1)
    first = {name: words.copy() for name, words in policy.words.items()}
    policy.step(0.2)
    policy.publish(store, 1)
    policy.words = first
    policy.publish(store, 2)
    skipped = read_deltas(store, 1, tmp_path)
    manifest = weights.read_manifest(store, VersionId(1, 2))
    edge = weights.Edge("delta", manifest.base, manifest.ref, SCHEMA.sha256, manifest.objects)
    block_reader.stage(store, edge, SCHEMA, tmp_path / "back")
    back = staged_file.read_staged(tmp_path / "back")
    assert list(fold_deltas([*skipped, back], SCHEMA)) == []


def test_a_codec_that_needs_the_words_between_is_refused(tmp_path: Path) -> None:
    _, store = publish([0.05, 0.05], Codec.L2)
    with pytest.raises(UnfoldableError, match="L2"):
        list(fold_deltas(read_deltas(store, 2, tmp_path), SCHEMA))
