"""One wrong bit anywhere in a stored version: refused each time, and the last good one serves."""

import random
from pathlib import Path

import pytest
from tests.support.weights.publishing import TrainedPolicy

from etude.common import weights
from etude.common.blobs import MemoryStore
from etude.common.errors import CorruptError
from etude.common.weights import VersionId, WeightManifest
from etude.common.weights.coding.container import TRAILER
from etude.common.weights.tensors.schema import Schema, TensorSpec
from etude.inference.engine.fake import MemoryEngine, MemoryRanks
from etude.inference.engine.interface import EngineInfo
from etude.inference.status import ReplicaStatus
from etude.inference.updates.follower import VersionFollower
from etude.inference.updates.staging import Stager

FLIPS = 1_000
"""Of each of two versions."""
GOOD, NEXT = VersionId(1, 0), VersionId(1, 1)
INFO = EngineInfo(model="tiny", vocab_size=2, max_model_len=2, max_concurrent=1)
SCHEMA = Schema(
    grid=2,
    tensors=(
        TensorSpec(name="a.q_proj.weight", dtype="BF16", shape=(64, 60), split="rows"),
        TensorSpec(name="b.down_proj.weight", dtype="BF16", shape=(60, 64), split="columns"),
        TensorSpec(name="c.bias", dtype="F32", shape=(50,), split="rows"),
        TensorSpec(name="d.codes", dtype="U8", shape=(300,), split="rows"),
    ),
)


class Flipped:
    """A store with two versions, the newer one of which is damaged again and again."""

    def __init__(self, share: float) -> None:
        self.store = MemoryStore()
        weights.claim_epoch(self.store, holder="trainer-0", parent=None, reason="start")
        self.policy = TrainedPolicy(SCHEMA)
        self.policy.publish(self.store, GOOD.number, complete=True)
        self.policy.step(share)
        self.manifest: WeightManifest = self.policy.publish(self.store, NEXT.number)
        keys = [NEXT.manifest_key, *(item.key for item in self.manifest.objects)]
        self.sound = {key: bytes(self.store.objects[key]) for key in keys}

    def flip(self, key: str, bit: int) -> None:
        """Damage one bit, after everything was repaired."""
        self.store.objects.update(self.sound)
        data = bytearray(self.sound[key])
        data[bit // 8] ^= 1 << bit % 8
        self.store.objects[key] = bytes(data)

    def read_by_replicas(self, key: str) -> int:
        """Bits of an object before its trailer, which is for tools alone."""
        size = len(self.sound[key])
        return 8 * (size if key.endswith(".json") else size - TRAILER.size)


def held(engine: MemoryEngine) -> dict[str, bytes]:
    """All live words of the one rank."""
    return {name: words.tobytes() for name, words in engine.ranks.words[0].items()}


def published(policy: TrainedPolicy, version: VersionId) -> dict[str, bytes]:
    return {name: words.tobytes() for name, words in policy.published[version].items()}


async def serving_the_good_one(
    flipped: Flipped, scratch: Path
) -> tuple[MemoryEngine, VersionFollower]:
    engine = MemoryEngine(INFO, MemoryRanks(1))
    stager = Stager(flipped.store, "uid-run", scratch)
    receiver = VersionFollower(stager=stager, engine=engine, status=ReplicaStatus(replica="r"))
    await receiver.activate(GOOD)
    return engine, receiver


@pytest.mark.parametrize("share", [0.05, 0.9], ids=["changes", "whole-blocks"])
async def test_a_version_with_one_wrong_bit_is_refused_and_the_last_good_one_serves(
    tmp_path: Path, share: float
) -> None:
    flipped = Flipped(share)
    engine, receiver = await serving_the_good_one(flipped, tmp_path)
    good, chance = published(flipped.policy, GOOD), random.Random(0)
    for _ in range(FLIPS):
        key = chance.choice(list(flipped.sound))
        bit = chance.randrange(flipped.read_by_replicas(key))
        flipped.flip(key, bit)
        with pytest.raises(CorruptError):
            await receiver.activate(NEXT)
        assert engine.live == GOOD
        assert held(engine) == good, f"bit {bit} of {key}"
    flipped.store.objects.update(flipped.sound)
    await receiver.activate(NEXT)
    assert held(engine) == published(flipped.policy, NEXT)


async def test_a_wrong_bit_that_only_tools_read_changes_no_weight(tmp_path: Path) -> None:
    flipped = Flipped(0.05)
    [item] = flipped.manifest.objects
    for bit in range(8 * (item.size - TRAILER.size), 8 * item.size, 7):
        flipped.flip(item.key, bit)
        engine, receiver = await serving_the_good_one(flipped, tmp_path)
        await receiver.activate(NEXT)
        assert held(engine) == published(flipped.policy, NEXT)
