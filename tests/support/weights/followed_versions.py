"""Versions that an engine in memory follows: what it must serve, and damage to the store."""

from tests.support.weights.publishing import TrainedPolicy, payload
from typing_extensions import override

from etude.common import weights
from etude.common.blobs import MemoryStore
from etude.common.weights import Keyframe, Skip, Stats, VersionId, WeightManifest
from etude.common.weights.tensors.schema import Schema, TensorSpec
from etude.inference.engine.fake import MemoryEngine

SCHEMA = Schema(
    grid=2,
    tensors=(
        TensorSpec(name="a.q_proj.weight", dtype="BF16", shape=(64, 60), split="rows"),
        TensorSpec(name="b.o_proj.weight", dtype="BF16", shape=(60, 64), split="columns"),
        TensorSpec(name="c.bias", dtype="F32", shape=(50,), split="rows"),
    ),
)


def assert_serves(engine: MemoryEngine, policy: TrainedPolicy, version: VersionId) -> None:
    """Every word on every rank, by the ranks' own slices of the published tensors."""
    assert engine.live == version
    expected = policy.published[version]
    for rank, words in enumerate(engine.ranks.words):
        for spec in SCHEMA.tensors:
            whole = expected[spec.name].reshape(spec.shape)
            half = whole.shape[-1 if spec.split == "columns" else 0] // 2
            cut = slice(rank * half, (rank + 1) * half)
            if whole.ndim == 2:
                whole = whole[:, cut] if spec.split == "columns" else whole[cut]
            assert words[spec.name].tolist() == whole.reshape(-1).tolist()


def damage(store: MemoryStore, manifest: WeightManifest) -> None:
    """Flip one bit of a payload, where no index is."""
    key = manifest.objects[0].key
    data = bytearray(store.objects[key])
    data[0] ^= 1
    store.objects[key] = bytes(data)


def add_keyframe(store: MemoryStore, policy: TrainedPolicy, manifest: WeightManifest) -> Keyframe:
    """What a keeper adds to a version: all of it."""
    kept = TrainedPolicy(SCHEMA, policy.published[manifest.version])
    packed = kept.packed(None)
    data = packed.container.data
    key = weights.publish_keyframe_part(store, manifest.version, 0, data)
    item = payload(MemoryStore(), manifest.version, packed, complete=True)
    record = Keyframe(
        run=manifest.run,
        target=manifest.ref,
        schema_sha256=SCHEMA.sha256,
        objects=(item.model_copy(update={"key": key}),),
        stats=Stats(**packed.stats._asdict()),
    )
    return weights.publish_folded(store, record)


def add_skip(
    store: MemoryStore, policy: TrainedPolicy, base: WeightManifest, target: WeightManifest
) -> Skip:
    """What a keeper folds: all that changed from one version to another."""
    kept = TrainedPolicy(SCHEMA, policy.published[target.version])
    kept.published = policy.published
    packed = kept.packed(base.ref)
    key = weights.publish_skip_part(store, base.version, target.version, 0, packed.container.data)
    item = payload(MemoryStore(), target.version, packed, complete=False)
    record = Skip(
        run=target.run,
        base=base.ref,
        target=target.ref,
        schema_sha256=SCHEMA.sha256,
        objects=(item.model_copy(update={"key": key}),),
        stats=Stats(**packed.stats._asdict()),
    )
    return weights.publish_folded(store, record)


class FlipsOnce(MemoryStore):
    """Damages the first range that is read of one object."""

    def __init__(self, *, objects: dict[str, bytes], victim: str) -> None:
        super().__init__(objects=objects)
        self.victim = victim

    @override
    def get_range(self, key: str, start: int, length: int) -> bytes:
        data = super().get_range(key, start, length)
        if key == self.victim and start == 0:
            self.victim = ""
            return bytes([data[0] ^ 1]) + data[1:]
        return data
