"""A version from a trainer's words, over the store, to a reader's: bit for bit, or refused."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.weights.publishing import TrainedPolicy

from etude.common import weights
from etude.common.blobs import MemoryStore, MissingError
from etude.common.errors import CorruptError
from etude.common.weights import VersionId
from etude.common.weights.protocol.versions import schema_key
from etude.common.weights.replicas import block_reader, staged_file
from etude.common.weights.replicas.live_weights import LiveWeights, identity_regions
from etude.common.weights.tensors.schema import Schema, TensorSpec, parse_schema
from etude.common.weights.tensors.words import word_type

V0, V1 = VersionId(1, 0), VersionId(1, 1)
SCHEMA = Schema(
    grid=1,
    tensors=(
        TensorSpec(name="embed", dtype="F32", shape=(2, 3), split="rows"),
        TensorSpec(name="mask", dtype="U8", shape=(5,), split="rows"),
        TensorSpec(name="norm", dtype="BF16", shape=(3,), split="rows"),
    ),
)


@pytest.fixture
def policy(store: MemoryStore) -> TrainedPolicy:
    """The trainer, which holds the first epoch."""
    weights.claim_epoch(store, holder="trainer-0", parent=None, reason="start")
    return TrainedPolicy(SCHEMA)


def content(store: MemoryStore, version: VersionId, folder: Path) -> dict[str, bytes]:
    """What a reader that begins with nothing holds once it is at a version.

    Raises:
        CorruptError: something on the way is damaged.
        MissingError: something on the way is gone.
    """
    manifest = weights.read_manifest(store, version)
    sha256 = manifest.schema_sha256
    schema = parse_schema(weights.read_schema_bytes(store, sha256), sha256=sha256, where="schema")
    words = {
        spec.name: word_type(spec.dtype).type(0).repeat(spec.elements) for spec in schema.tensors
    }
    live = LiveWeights(schema, words, identity_regions(schema))
    for edge in weights.plan_path(store, None, version):
        block_reader.stage(store, edge, schema, folder / "staged")
        assert live.write(live.prepare(staged_file.read_staged(folder / "staged")))
    assert live.scan().hex() == manifest.state
    weights.is_accepted(store, version)
    return {name: found.tobytes() for name, found in words.items()}


def published(policy: TrainedPolicy, version: VersionId) -> dict[str, bytes]:
    return {name: words.tobytes() for name, words in policy.published[version].items()}


def test_a_published_version_reads_back_bit_for_bit(
    store: MemoryStore, policy: TrainedPolicy, tmp_path: Path
) -> None:
    for number in range(5):
        manifest = policy.publish(store, number, complete=number in {0, 3})
        assert weights.newest_version(store) == manifest.version == VersionId(1, number)
        policy.step(0.3)
    for version in policy.published:
        assert content(store, version, tmp_path) == published(policy, version)


def test_a_payload_that_is_gone_is_missing_and_not_corrupt(
    store: MemoryStore, policy: TrainedPolicy, tmp_path: Path
) -> None:
    manifest = policy.publish(store, 0, complete=True)
    del store.objects[manifest.objects[0].key]
    with pytest.raises(MissingError):
        content(store, V0, tmp_path)


Change = Callable[[bytes], bytes]


@pytest.mark.parametrize("change", [lambda data: data[:-60], lambda _: b""], ids=["cut", "empty"])
def test_a_payload_that_was_cut_is_refused(
    store: MemoryStore, policy: TrainedPolicy, tmp_path: Path, change: Change
) -> None:
    key = policy.publish(store, 0, complete=True).objects[0].key
    store.objects[key] = change(bytes(store.objects[key]))
    with pytest.raises(CorruptError, match=key):
        content(store, V0, tmp_path)


def test_each_of_2000_flipped_bits_of_what_describes_a_version_is_detected(
    store: MemoryStore, policy: TrainedPolicy, tmp_path: Path
) -> None:
    policy.publish(store, 0, complete=True)
    policy.step(0.5)
    policy.publish(store, 1)
    keys = [
        "weights/epochs/000001.json",
        schema_key(SCHEMA.sha256),
        V0.manifest_key,
        V1.manifest_key,
    ]
    draw = random.Random(1)
    for turn in range(2_000):
        key = keys[turn % len(keys)]
        good = store.objects[key]
        bad = bytearray(good)
        bad[draw.randrange(len(bad))] ^= 1 << draw.randrange(8)
        store.objects[key] = bytes(bad)
        with pytest.raises(CorruptError):
            content(store, V1, tmp_path)
        store.objects[key] = good
    assert content(store, V1, tmp_path) == published(policy, V1)
