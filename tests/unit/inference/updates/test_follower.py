"""The receiver serves verified, accepted versions, or goes on serving the old one."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from tests.support.weights.followed_versions import SCHEMA, assert_serves, damage
from tests.support.weights.publishing import TrainedPolicy
from typing_extensions import override

from etude.common import weights
from etude.common.blobs import MemoryStore, ObjectInfo
from etude.common.errors import (
    CorruptError,
    FencedError,
    StoreError,
    UnavailableError,
    UnknownIdError,
)
from etude.common.weights import VersionId, WeightManifest
from etude.common.weights.replicas.live_weights import LiveWeights
from etude.common.weights.tensors.schema import Schema
from etude.inference.engine.fake import MemoryEngine, MemoryRanks
from etude.inference.status import ReplicaState
from etude.inference.updates import follower as receivers
from etude.inference.updates.follower import VersionFollower

Publish = Callable[..., WeightManifest]


def staged(receiver: VersionFollower) -> set[str]:
    return {path.name for path in (receiver.stager.scratch / "staged").iterdir()}


async def test_a_replica_is_not_ready_before_the_first_version(
    receiver: VersionFollower, engine: MemoryEngine
) -> None:
    await receiver.catch_up()
    assert receiver.status.state is ReplicaState.LOADING
    assert not receiver.status.is_ready
    assert engine.live is None


async def test_following_commits_the_newest_version(
    receiver: VersionFollower, engine: MemoryEngine, publish: Publish
) -> None:
    publish(0)
    publish(1)
    manifest = publish(2)
    await receiver.catch_up()
    assert engine.live == VersionId(1, 2)
    assert receiver.status.state is ReplicaState.SERVING
    assert receiver.status.manifest_sha256.hex() == manifest.sha256
    assert staged(receiver) == set()


async def test_committing_the_live_version_again_does_nothing(
    receiver: VersionFollower, engine: MemoryEngine, publish: Publish
) -> None:
    publish(0)
    await receiver.activate(VersionId(1, 0))
    status = await receiver.activate(VersionId(1, 0))
    assert engine.activated == [VersionId(1, 0)]
    assert status.live == VersionId(1, 0)


async def test_a_late_repeat_of_an_older_commit_does_not_go_back(
    receiver: VersionFollower, engine: MemoryEngine, publish: Publish
) -> None:
    for number in range(3):
        publish(number)
    await receiver.catch_up()
    labels = len(engine.activated)
    assert (await receiver.activate(VersionId(1, 1))).live == VersionId(1, 2)
    assert (engine.live, len(engine.activated)) == (VersionId(1, 2), labels)


async def test_commits_at_the_same_time_run_one_after_the_other(
    receiver: VersionFollower, engine: MemoryEngine, publish: Publish
) -> None:
    for number in range(4):
        publish(number)
    async with asyncio.TaskGroup() as group:
        for number in (1, 3, 2, 0):
            group.create_task(receiver.activate(VersionId(1, number)), name=f"commit-{number}")
    assert engine.live == VersionId(1, 3)
    assert engine.activated == sorted(engine.activated)


async def test_a_missing_version_leaves_the_old_one_serving_and_says_so(
    receiver: VersionFollower, engine: MemoryEngine, publish: Publish
) -> None:
    publish(0)
    await receiver.catch_up()
    with pytest.raises(UnknownIdError, match=r"version 1\.9"):
        await receiver.activate(VersionId(1, 9))
    assert engine.live == VersionId(1, 0)
    assert receiver.status.is_ready
    assert receiver.status.reason == "NotFound"
    assert "1.9" in receiver.status.message


async def test_a_corrupt_version_leaves_the_old_one_serving_and_says_so(
    receiver: VersionFollower,
    engine: MemoryEngine,
    publish: Publish,
    policy: TrainedPolicy,
    store: MemoryStore,
) -> None:
    publish(0)
    await receiver.catch_up()
    manifest = publish(1)
    damage(store, manifest)
    with pytest.raises(CorruptError, match="blake3"):
        await receiver.activate(VersionId(1, 1))
    assert_serves(engine, policy, VersionId(1, 0))
    assert receiver.status.state is ReplicaState.CATCHING_UP
    assert receiver.status.reason == "Corrupt"
    assert manifest.objects[0].key in receiver.status.message


async def test_a_version_whose_payload_is_gone_leaves_the_old_one_serving(
    receiver: VersionFollower,
    engine: MemoryEngine,
    publish: Publish,
    policy: TrainedPolicy,
    store: MemoryStore,
) -> None:
    publish(0)
    await receiver.catch_up()
    key = publish(1).objects[0].key
    del store.objects[key]
    with pytest.raises(UnknownIdError, match=key):
        await receiver.activate(VersionId(1, 1))
    assert_serves(engine, policy, VersionId(1, 0))
    assert (receiver.status.is_ready, receiver.status.reason) == (True, "NotFound")


async def test_a_version_of_other_tensors_writes_nothing_and_asks_for_a_restart(
    receiver: VersionFollower,
    engine: MemoryEngine,
    publish: Publish,
    policy: TrainedPolicy,
    store: MemoryStore,
) -> None:
    publish(0)
    await receiver.catch_up()
    other = TrainedPolicy(Schema(grid=SCHEMA.grid, tensors=SCHEMA.tensors[:-1]))
    other.publish(store, 1, complete=True)
    with pytest.raises(UnavailableError, match="restart the replica to map them"):
        await receiver.catch_up()
    assert_serves(engine, policy, VersionId(1, 0))
    with pytest.raises(UnavailableError, match="restart the replica to map them"):
        await receiver.follow()


@pytest.mark.parametrize("is_cut", [False, True])
async def test_a_corrupt_first_version_keeps_the_replica_not_ready(
    receiver: VersionFollower, publish: Publish, store: MemoryStore, *, is_cut: bool
) -> None:
    manifest = publish(0)
    damage(store, manifest)
    if is_cut:
        store.objects[manifest.objects[0].key] = b""
    with pytest.raises(CorruptError):
        await receiver.catch_up()
    assert receiver.status.state is ReplicaState.NOT_READY
    assert not receiver.status.is_ready


class PickyRanks(MemoryRanks):
    """Ranks of a model that the tensors of versions do not fit."""

    fits = False

    @override
    def _open(self, schema: Schema, rank: int) -> LiveWeights:
        if not self.fits:
            raise CorruptError("the tensors do not fit the model")
        return super()._open(schema, rank)


async def test_a_version_that_does_not_fit_the_model_is_refused_until_one_does(
    receiver: VersionFollower, engine: MemoryEngine, publish: Publish, policy: TrainedPolicy
) -> None:
    ranks = PickyRanks(2)
    engine.ranks = engine.swap.ranks = ranks
    publish(0)
    with pytest.raises(CorruptError, match="do not fit the model"):
        await receiver.catch_up()
    assert (receiver.status.state, engine.live) == (ReplicaState.NOT_READY, None)
    ranks.fits = True
    publish(1)
    await receiver.catch_up()
    assert_serves(engine, policy, VersionId(1, 1))


async def test_a_refused_version_is_healed_by_the_next_complete_one(
    receiver: VersionFollower, publish: Publish, store: MemoryStore
) -> None:
    damage(store, publish(0))
    with pytest.raises(CorruptError):
        await receiver.catch_up()
    publish(1, complete=True)
    await receiver.catch_up()
    assert (receiver.status.state, receiver.status.reason) == (ReplicaState.SERVING, "")
    assert staged(receiver) == set()


async def test_a_version_of_another_run_is_refused(
    receiver: VersionFollower, publish: Publish
) -> None:
    publish(0, run="somebody-elses")
    with pytest.raises(CorruptError, match="of run somebody-elses, not uid-run"):
        await receiver.catch_up()


async def test_a_version_above_the_parent_of_a_newer_epoch_is_refused(
    receiver: VersionFollower, engine: MemoryEngine, publish: Publish, store: MemoryStore
) -> None:
    for number in range(3):
        publish(number)
    weights.claim_epoch(store, holder="t", parent=VersionId(1, 1), reason="takeover")
    with pytest.raises(FencedError, match="not on the accepted chain"):
        await receiver.activate(VersionId(1, 2))
    assert engine.activated == []
    await receiver.catch_up()
    assert engine.live == VersionId(1, 1)


async def test_a_replica_on_an_abandoned_version_returns_to_the_accepted_chain(
    receiver: VersionFollower,
    engine: MemoryEngine,
    publish: Publish,
    policy: TrainedPolicy,
    store: MemoryStore,
) -> None:
    first = publish(0)
    publish(1)
    await receiver.catch_up()
    weights.claim_epoch(store, holder="t", parent=VersionId(1, 0), reason="rollback")
    await receiver.catch_up()
    assert_serves(engine, policy, VersionId(1, 0))
    policy.resume(first.ref)
    publish(2, epoch=2)
    await receiver.catch_up()
    assert_serves(engine, policy, VersionId(2, 2))


async def test_a_zombies_manifest_that_appears_while_its_payload_is_fetched_is_refused(
    receiver: VersionFollower, engine: MemoryEngine, publish: Publish, store: MemoryStore
) -> None:
    publish(0)
    await receiver.catch_up()
    publish(1)
    receiver.stager.store = TakesOverDuringFetch(objects=store.objects)
    with pytest.raises(FencedError):
        await receiver.activate(VersionId(1, 1))
    assert engine.activated == [VersionId(1, 0)]


async def test_a_store_that_is_down_changes_nothing_but_the_reason(
    receiver: VersionFollower, engine: MemoryEngine, publish: Publish, store: MemoryStore
) -> None:
    publish(0)
    await receiver.catch_up()
    receiver.stager.store = Down()
    with pytest.raises(StoreError):
        await receiver.catch_up()
    assert receiver.status.reason == "StorageUnavailable"
    assert receiver.status.is_ready
    receiver.stager.store = store
    await receiver.catch_up()
    assert (receiver.status.state, receiver.status.reason) == (ReplicaState.SERVING, "")
    assert engine.activated == [VersionId(1, 0)]


async def test_watching_shows_the_present_status_and_then_the_latest(
    receiver: VersionFollower, publish: Publish
) -> None:
    publish(0)
    watch = receiver.watch()
    assert (await anext(watch)).state is ReplicaState.LOADING
    await receiver.catch_up()
    assert (await anext(watch)).live == VersionId(1, 0)
    publish(1)
    _, status = await asyncio.gather(receiver.catch_up(), anext(watch))
    while status.live != VersionId(1, 1) or status.state is not ReplicaState.SERVING:
        status = await anext(watch)
    await watch.aclose()  # type: ignore[attr-defined]  # it is a generator


async def test_following_ends_when_the_engine_cannot_go_on(
    receiver: VersionFollower,
    engine: MemoryEngine,
    publish: Publish,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(receivers, "POLL_S", 0.001)
    publish(0)
    async with asyncio.TaskGroup() as group:
        following = group.create_task(expect_end(receiver), name="follow")
        async for status in receiver.watch():
            if status.is_ready:
                break
        engine.fail("the step failed")
        await following


async def expect_end(receiver: VersionFollower) -> None:
    with pytest.raises(UnavailableError, match="the step failed"):
        await receiver.follow()


@dataclass(slots=True)
class TakesOverDuringFetch(MemoryStore):
    """A newer publisher opens its epoch while a payload is being read."""

    done: bool = False

    @override
    def view(self, key: str, start: int, length: int) -> memoryview:
        if key.endswith(".dlt") and not self.done:
            self.done = True
            weights.claim_epoch(self, holder="t", parent=VersionId(1, 0), reason="takeover")
        return MemoryStore.view(self, key, start, length)


class Down(MemoryStore):
    """Answers nothing."""

    @override
    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        raise StoreError("connection refused")
