"""The receiver follows versions by what changed, verified, exact, around whatever is damaged."""

from pathlib import Path

import pytest
from tests.support.publishing import TrainedPolicy, payload
from typing_extensions import override

from etude.common import weights
from etude.common.blobs import MemoryStore
from etude.common.errors import CorruptError, FencedError, UnavailableError
from etude.common.weights import Keyframe, Stats, Tensor, VersionId, WeightManifest
from etude.common.weights.leases import seen_leases
from etude.common.weights.schema import Schema, TensorSpec
from etude.inference.memory import MemoryEngine, MemoryRanks
from etude.inference.policy import EngineInfo
from etude.inference.receiver import Receiver
from etude.inference.staging import Stager
from etude.inference.status import State, Status

SCHEMA = Schema(
    grid=2,
    tensors=(
        TensorSpec(name="a.q_proj.weight", dtype="BF16", shape=(64, 60), split="rows"),
        TensorSpec(name="b.o_proj.weight", dtype="BF16", shape=(60, 64), split="columns"),
        TensorSpec(name="c.bias", dtype="F32", shape=(50,), split="rows"),
    ),
)


@pytest.fixture
def policy() -> TrainedPolicy:
    return TrainedPolicy(SCHEMA)


@pytest.fixture
def engine(info: EngineInfo) -> MemoryEngine:
    return MemoryEngine(info, MemoryRanks(2))


@pytest.fixture
def versions(policy: TrainedPolicy, store: MemoryStore) -> list[WeightManifest]:
    """A complete version and two deltas."""
    found = [policy.publish(store, 0, complete=True)]
    for number in (1, 2):
        policy.step()
        found.append(policy.publish(store, number))
    return found


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
    return weights.write_folded(store, record)


async def test_a_fresh_replica_comes_to_the_newest_version_over_the_whole_chain(
    receiver: Receiver,
    engine: MemoryEngine,
    policy: TrainedPolicy,
    versions: list[WeightManifest],
) -> None:
    await receiver.catch_up()
    assert_serves(engine, policy, VersionId(1, 2))
    assert receiver.status.state is State.SERVING
    assert receiver.status.manifest_sha256.hex() == versions[-1].sha256


async def test_each_version_is_exact_when_they_come_one_by_one(
    receiver: Receiver, engine: MemoryEngine, policy: TrainedPolicy, store: MemoryStore
) -> None:
    policy.publish(store, 0, complete=True)
    await receiver.catch_up()
    for number in range(1, 30):
        policy.step(0.3 if number % 7 else 0.0)
        policy.publish(store, number)
        await receiver.catch_up()
        assert_serves(engine, policy, VersionId(1, number))
    assert not list((receiver.stager.scratch / "staged").iterdir())


async def test_a_version_in_which_nothing_changed_is_only_a_name(
    receiver: Receiver,
    engine: MemoryEngine,
    policy: TrainedPolicy,
    store: MemoryStore,
    versions: list[WeightManifest],
) -> None:
    await receiver.catch_up()
    engine.ranks.calls.clear()
    policy.publish(store, 3)
    await receiver.catch_up()
    assert_serves(engine, policy, VersionId(1, 3))
    assert engine.ranks.calls == []


async def test_the_lease_names_what_is_served(
    receiver: Receiver, store: MemoryStore, versions: list[WeightManifest]
) -> None:
    await receiver.catch_up()
    [lease] = seen_leases(store)
    assert (lease.replica, lease.needs) == ("tiny-inference-0", VersionId(1, 2))


async def test_a_damaged_delta_leaves_the_old_version_serving_and_says_so(
    receiver: Receiver,
    engine: MemoryEngine,
    policy: TrainedPolicy,
    store: MemoryStore,
    versions: list[WeightManifest],
) -> None:
    await receiver.catch_up()
    policy.step()
    damage(store, policy.publish(store, 3))
    with pytest.raises(CorruptError, match="blake3"):
        await receiver.catch_up()
    assert_serves(engine, policy, VersionId(1, 2))
    assert (receiver.status.state, receiver.status.reason) == (State.CATCHING_UP, "Corrupt")


async def test_damage_on_the_way_is_read_again(
    receiver: Receiver, engine: MemoryEngine, policy: TrainedPolicy, store: MemoryStore
) -> None:
    manifest = policy.publish(store, 0, complete=True)
    receiver.stager.store = FlipsOnce(objects=store.objects, victim=manifest.objects[0].key)
    await receiver.catch_up()
    assert_serves(engine, policy, VersionId(1, 0))


async def test_a_damaged_delta_is_gone_around_by_a_keyframe(
    receiver: Receiver,
    engine: MemoryEngine,
    policy: TrainedPolicy,
    store: MemoryStore,
    versions: list[WeightManifest],
) -> None:
    await receiver.catch_up()
    policy.step()
    damaged = policy.publish(store, 3)
    damage(store, damaged)
    add_keyframe(store, policy, damaged)
    await receiver.catch_up()
    assert_serves(engine, policy, VersionId(1, 3))
    assert receiver.status.reason == ""


async def test_a_manifest_that_lies_about_its_state_is_refused_before_the_first_write(
    receiver: Receiver,
    engine: MemoryEngine,
    policy: TrainedPolicy,
    store: MemoryStore,
    versions: list[WeightManifest],
) -> None:
    await receiver.catch_up()
    policy.step()
    policy.publish(store, 3, state="0" * 32)
    engine.ranks.calls.clear()
    with pytest.raises(CorruptError, match="would lead to state"):
        await receiver.catch_up()
    assert_serves(engine, policy, VersionId(1, 2))
    assert "commit" not in engine.ranks.calls


async def test_a_rank_that_fails_is_undone_and_the_next_try_succeeds(
    receiver: Receiver,
    engine: MemoryEngine,
    policy: TrainedPolicy,
    store: MemoryStore,
    versions: list[WeightManifest],
) -> None:
    await receiver.catch_up()
    policy.step()
    policy.publish(store, 3)
    engine.ranks.fail["commit"] = 1
    with pytest.raises(UnavailableError, match="rank 1"):
        await receiver.catch_up()
    assert_serves(engine, policy, VersionId(1, 2))
    assert receiver.status.is_ready
    await receiver.catch_up()
    assert_serves(engine, policy, VersionId(1, 3))


async def test_an_undo_that_fails_makes_the_replica_not_ready_and_ends_it(
    receiver: Receiver,
    engine: MemoryEngine,
    policy: TrainedPolicy,
    store: MemoryStore,
    versions: list[WeightManifest],
) -> None:
    await receiver.catch_up()
    policy.step()
    policy.publish(store, 3)
    engine.ranks.fail |= {"commit": 1, "undo": 0}
    with pytest.raises(UnavailableError):
        await receiver.catch_up()
    assert receiver.status.state is State.NOT_READY
    with pytest.raises(UnavailableError, match="could not be undone"):
        await receiver.follow()


async def test_a_rollback_to_the_version_before_reads_no_payload(
    receiver: Receiver,
    engine: MemoryEngine,
    policy: TrainedPolicy,
    store: MemoryStore,
    versions: list[WeightManifest],
) -> None:
    for number in range(3):
        await receiver.commit(VersionId(1, number))
    weights.claim_epoch(store, holder="t", parent=VersionId(1, 1), reason="rollback")
    engine.ranks.calls.clear()
    await receiver.catch_up()
    assert_serves(engine, policy, VersionId(1, 1))
    assert (engine.ranks.calls, engine.dropped_caches) == (["undo"], 1)
    policy.resume(versions[1].ref)
    policy.step()
    policy.publish(store, 3, epoch=2)
    await receiver.catch_up()
    assert_serves(engine, policy, VersionId(2, 3))


async def test_a_rollback_over_several_versions_starts_from_a_complete_one(
    receiver: Receiver,
    engine: MemoryEngine,
    policy: TrainedPolicy,
    store: MemoryStore,
    versions: list[WeightManifest],
) -> None:
    await receiver.catch_up()
    weights.claim_epoch(store, holder="t", parent=VersionId(1, 0), reason="rollback")
    await receiver.catch_up()
    assert_serves(engine, policy, VersionId(1, 0))


async def test_a_resume_that_repeats_the_same_steps_moves_no_bytes(
    receiver: Receiver,
    engine: MemoryEngine,
    policy: TrainedPolicy,
    store: MemoryStore,
    versions: list[WeightManifest],
) -> None:
    await receiver.catch_up()
    weights.claim_epoch(store, holder="t", parent=VersionId(1, 1), reason="takeover")
    same = policy.published[VersionId(1, 2)]
    policy.resume(versions[1].ref)
    policy.words = {name: words.copy() for name, words in same.items()}
    policy.publish(store, 3, epoch=2)
    engine.ranks.calls.clear()
    await receiver.catch_up()
    assert_serves(engine, policy, VersionId(2, 3))
    assert engine.ranks.calls == []


async def test_a_version_of_a_dead_epoch_is_refused(
    receiver: Receiver,
    engine: MemoryEngine,
    store: MemoryStore,
    versions: list[WeightManifest],
) -> None:
    weights.claim_epoch(store, holder="t", parent=VersionId(1, 1), reason="takeover")
    with pytest.raises(FencedError):
        await receiver.commit(VersionId(1, 2))
    assert engine.live is None


async def test_a_quarantined_version_is_not_followed(
    receiver: Receiver,
    engine: MemoryEngine,
    policy: TrainedPolicy,
    store: MemoryStore,
    versions: list[WeightManifest],
) -> None:
    weights.quarantine(store, VersionId(1, 2), reason="wrong")
    await receiver.catch_up()
    assert_serves(engine, policy, VersionId(1, 1))


async def test_damaged_memory_is_found_by_the_audit_and_ends_the_replica(
    tmp_path: Path,
    engine: MemoryEngine,
    policy: TrainedPolicy,
    store: MemoryStore,
    versions: list[WeightManifest],
) -> None:
    receiver = Receiver(
        stager=Stager(store, "uid-run", tmp_path),
        engine=engine,
        status=Status(replica="r-0"),
        audit_every=1,
    )
    await receiver.catch_up()
    engine.ranks.words[1]["a.q_proj.weight"][0] ^= 1
    policy.words["c.bias"][7] ^= 1
    policy.publish(store, 3)
    with pytest.raises(UnavailableError, match="live words"):
        await receiver.catch_up()
    assert receiver.status.state is State.NOT_READY


async def test_a_restart_drops_what_was_staged_and_catches_up(
    receiver: Receiver,
    info: EngineInfo,
    policy: TrainedPolicy,
    store: MemoryStore,
    tmp_path: Path,
    versions: list[WeightManifest],
) -> None:
    await receiver.catch_up()
    left = tmp_path / "staged" / "1-7"
    left.write_bytes(b"half of it")
    fresh = MemoryEngine(info, MemoryRanks(2))
    again = Receiver(
        stager=Stager(store, "uid-run", tmp_path),
        engine=fresh,
        status=Status(replica="tiny-inference-0"),
    )
    assert not left.exists()
    await again.catch_up()
    assert_serves(fresh, policy, VersionId(1, 2))


async def test_a_full_or_broken_scratch_disk_leaves_the_live_version_serving(
    receiver: Receiver,
    engine: MemoryEngine,
    policy: TrainedPolicy,
    store: MemoryStore,
    versions: list[WeightManifest],
) -> None:
    await receiver.catch_up()
    policy.step()
    policy.publish(store, 3)
    sound, receiver.stager.scratch = receiver.stager.scratch, receiver.stager.scratch / "no-folder"
    receiver.stager.scratch.touch()
    with pytest.raises(UnavailableError, match=r"cannot stage version 1\.3: .*no-folder"):
        await receiver.catch_up()
    assert_serves(engine, policy, VersionId(1, 2))
    receiver.stager.scratch = sound
    await receiver.catch_up()
    assert_serves(engine, policy, VersionId(1, 3))


async def test_changes_after_whole_versions_ask_for_a_restart(
    receiver: Receiver, engine: MemoryEngine, policy: TrainedPolicy, store: MemoryStore
) -> None:
    tensor = Tensor(name="w", dtype="F32", shape=(1,), data=bytes(4))
    weights.publish(
        store, run="uid-run", version=VersionId(1, 0), step=0, holder="t", tensors=[tensor]
    )
    await receiver.catch_up()
    assert engine.live == VersionId(1, 0)
    policy.publish(store, 1, complete=True)
    with pytest.raises(UnavailableError, match="a restart reads the changes"):
        await receiver.catch_up()
    assert engine.failed


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
