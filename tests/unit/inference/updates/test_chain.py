"""The receiver follows versions by what changed, exact, over rollbacks, resumes and restarts."""

from pathlib import Path

import pytest
from tests.support.weights.followed_versions import assert_serves
from tests.support.weights.publishing import TrainedPolicy

from etude.common import weights
from etude.common.blobs import MemoryStore
from etude.common.errors import FencedError
from etude.common.weights import VersionId, WeightManifest
from etude.common.weights.protocol.reader_leases import observe_leases
from etude.inference.engine.fake import MemoryEngine, MemoryRanks
from etude.inference.engine.interface import EngineInfo
from etude.inference.status import ReplicaState, ReplicaStatus
from etude.inference.updates.follower import VersionFollower
from etude.inference.updates.staging import Stager


async def test_a_fresh_replica_comes_to_the_newest_version_over_the_whole_chain(
    receiver: VersionFollower,
    engine: MemoryEngine,
    policy: TrainedPolicy,
    versions: list[WeightManifest],
) -> None:
    await receiver.catch_up()
    assert_serves(engine, policy, VersionId(1, 2))
    assert receiver.status.state is ReplicaState.SERVING
    assert receiver.status.manifest_sha256.hex() == versions[-1].sha256


async def test_each_version_is_exact_when_they_come_one_by_one(
    receiver: VersionFollower, engine: MemoryEngine, policy: TrainedPolicy, store: MemoryStore
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
    receiver: VersionFollower,
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
    receiver: VersionFollower, store: MemoryStore, versions: list[WeightManifest]
) -> None:
    await receiver.catch_up()
    [lease] = observe_leases(store)
    assert (lease.replica, lease.needs) == ("tiny-inference-0", VersionId(1, 2))


async def test_a_rollback_to_the_version_before_reads_no_payload(
    receiver: VersionFollower,
    engine: MemoryEngine,
    policy: TrainedPolicy,
    store: MemoryStore,
    versions: list[WeightManifest],
) -> None:
    for number in range(3):
        await receiver.activate(VersionId(1, number))
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
    receiver: VersionFollower,
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
    receiver: VersionFollower,
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
    receiver: VersionFollower,
    engine: MemoryEngine,
    store: MemoryStore,
    versions: list[WeightManifest],
) -> None:
    weights.claim_epoch(store, holder="t", parent=VersionId(1, 1), reason="takeover")
    with pytest.raises(FencedError):
        await receiver.activate(VersionId(1, 2))
    assert engine.live is None


async def test_a_quarantined_version_is_not_followed(
    receiver: VersionFollower,
    engine: MemoryEngine,
    policy: TrainedPolicy,
    store: MemoryStore,
    versions: list[WeightManifest],
) -> None:
    weights.quarantine(store, VersionId(1, 2), reason="wrong")
    await receiver.catch_up()
    assert_serves(engine, policy, VersionId(1, 1))


async def test_a_restart_drops_what_was_staged_and_catches_up(
    receiver: VersionFollower,
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
    again = VersionFollower(
        stager=Stager(store, "uid-run", tmp_path),
        engine=fresh,
        status=ReplicaStatus(replica="tiny-inference-0"),
    )
    assert not left.exists()
    await again.catch_up()
    assert_serves(fresh, policy, VersionId(1, 2))
