"""Damage and failures on the way to a version: refused, gone around or undone, never half-way."""

from pathlib import Path

import pytest
from tests.support.weights.followed_versions import FlipsOnce, add_keyframe, assert_serves, damage
from tests.support.weights.publishing import TrainedPolicy

from etude.common.blobs import MemoryStore
from etude.common.errors import CorruptError, UnavailableError
from etude.common.weights import VersionId, WeightManifest
from etude.inference.engine.fake import MemoryEngine
from etude.inference.status import ReplicaState, ReplicaStatus
from etude.inference.updates.follower import VersionFollower
from etude.inference.updates.staging import Stager


async def test_a_damaged_delta_leaves_the_old_version_serving_and_says_so(
    receiver: VersionFollower,
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
    assert (receiver.status.state, receiver.status.reason) == (ReplicaState.CATCHING_UP, "Corrupt")


async def test_damage_on_the_way_is_read_again(
    receiver: VersionFollower, engine: MemoryEngine, policy: TrainedPolicy, store: MemoryStore
) -> None:
    manifest = policy.publish(store, 0, complete=True)
    receiver.stager.store = FlipsOnce(objects=store.objects, victim=manifest.objects[0].key)
    await receiver.catch_up()
    assert_serves(engine, policy, VersionId(1, 0))


async def test_a_damaged_delta_is_gone_around_by_a_keyframe(
    receiver: VersionFollower,
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
    receiver: VersionFollower,
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
    assert "activate" not in engine.ranks.calls


async def test_a_rank_that_fails_is_undone_and_the_next_try_succeeds(
    receiver: VersionFollower,
    engine: MemoryEngine,
    policy: TrainedPolicy,
    store: MemoryStore,
    versions: list[WeightManifest],
) -> None:
    await receiver.catch_up()
    policy.step()
    policy.publish(store, 3)
    engine.ranks.fail["activate"] = 1
    with pytest.raises(UnavailableError, match="rank 1"):
        await receiver.catch_up()
    assert_serves(engine, policy, VersionId(1, 2))
    assert receiver.status.is_ready
    await receiver.catch_up()
    assert_serves(engine, policy, VersionId(1, 3))


async def test_an_undo_that_fails_makes_the_replica_not_ready_and_ends_it(
    receiver: VersionFollower,
    engine: MemoryEngine,
    policy: TrainedPolicy,
    store: MemoryStore,
    versions: list[WeightManifest],
) -> None:
    await receiver.catch_up()
    policy.step()
    policy.publish(store, 3)
    engine.ranks.fail |= {"activate": 1, "undo": 0}
    with pytest.raises(UnavailableError):
        await receiver.catch_up()
    assert receiver.status.state is ReplicaState.NOT_READY
    with pytest.raises(UnavailableError, match="could not be undone"):
        await receiver.follow()


async def test_damaged_memory_is_found_by_the_audit_and_ends_the_replica(
    tmp_path: Path,
    engine: MemoryEngine,
    policy: TrainedPolicy,
    store: MemoryStore,
    versions: list[WeightManifest],
) -> None:
    receiver = VersionFollower(
        stager=Stager(store, "uid-run", tmp_path),
        engine=engine,
        status=ReplicaStatus(replica="r-0"),
        audit_every=1,
    )
    await receiver.catch_up()
    engine.ranks.words[1]["a.q_proj.weight"][0] ^= 1
    policy.words["c.bias"][7] ^= 1
    policy.publish(store, 3)
    with pytest.raises(UnavailableError, match="live words"):
        await receiver.catch_up()
    assert receiver.status.state is ReplicaState.NOT_READY


async def test_a_full_or_broken_scratch_disk_leaves_the_live_version_serving(
    receiver: VersionFollower,
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
