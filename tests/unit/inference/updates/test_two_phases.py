"""A replica moves in two phases, back again, or not at all, as it is told."""

import asyncio
from pathlib import Path

import pytest
from tests.support.weights.publishing import TrainedPolicy

from etude.common import weights
from etude.common.blobs import MemoryStore
from etude.common.errors import (
    CorruptError,
    FencedError,
    StoreError,
    UnavailableError,
    UnknownIdError,
)
from etude.common.weights import VersionId, WeightManifest
from etude.common.weights.tensors.schema import Schema, TensorSpec
from etude.inference.engine.fake import MemoryEngine, MemoryRanks
from etude.inference.engine.interface import EngineInfo
from etude.inference.status import ReplicaState, ReplicaStatus
from etude.inference.updates import audit
from etude.inference.updates import follower as receivers
from etude.inference.updates.follower import VersionFollower
from etude.inference.updates.staging import Stager

SCHEMA = Schema(
    grid=2,
    tensors=(TensorSpec(name="a.q_proj.weight", dtype="BF16", shape=(64, 60), split="rows"),),
)
V = [VersionId(1, number) for number in range(9)]


@pytest.fixture
def policy() -> TrainedPolicy:
    return TrainedPolicy(SCHEMA)


@pytest.fixture
def engine(info: EngineInfo) -> MemoryEngine:
    return MemoryEngine(info, MemoryRanks(2))


@pytest.fixture
def receiver(store: MemoryStore, engine: MemoryEngine, tmp_path: Path) -> VersionFollower:
    return VersionFollower(
        stager=Stager(store, "uid-run", tmp_path),
        engine=engine,
        status=ReplicaStatus(replica="inference-0"),
        instance="inference-0.ab12",
        audit_every=2,
    )


@pytest.fixture
async def serving(
    receiver: VersionFollower, policy: TrainedPolicy, store: MemoryStore
) -> list[WeightManifest]:
    """Version 0 is live, and version 1 is published."""
    found = [policy.publish(store, 0, complete=True)]
    await receiver.catch_up()
    policy.step()
    return [*found, policy.publish(store, 1)]


async def test_a_staged_version_is_invisible_until_it_is_committed(
    receiver: VersionFollower, engine: MemoryEngine, serving: list[WeightManifest]
) -> None:
    before = [words["a.q_proj.weight"].tobytes() for words in engine.ranks.words]
    status = await receiver.stage(V[1])
    assert (status.staged, status.live, status.state) == (V[1], V[0], ReplicaState.SERVING)
    assert status.state_digest == bytes.fromhex(serving[0].state)
    assert [words["a.q_proj.weight"].tobytes() for words in engine.ranks.words] == before
    engine.ranks.calls.clear()
    status = await receiver.activate(V[1])
    assert (status.staged, status.live, status.undo_depth) == (None, V[1], 1)
    assert status.state_digest == bytes.fromhex(serving[1].state)
    assert "prepare" not in engine.ranks.calls


async def test_staging_again_does_nothing_and_staging_another_takes_its_place(
    receiver: VersionFollower,
    engine: MemoryEngine,
    policy: TrainedPolicy,
    store: MemoryStore,
    serving: list[WeightManifest],
) -> None:
    await receiver.stage(V[1])
    engine.ranks.calls.clear()
    await receiver.stage(V[1])
    assert engine.ranks.calls == []
    policy.step()
    policy.publish(store, 2)
    status = await receiver.stage(V[2])
    assert (status.live, status.staged) == (V[1], V[2])
    assert (await receiver.activate(V[2])).live == V[2]
    assert (await engine.swap.scan()).hex() == engine.swap.state


async def test_a_version_that_is_refused_is_refused_in_the_first_phase(
    receiver: VersionFollower,
    engine: MemoryEngine,
    store: MemoryStore,
    serving: list[WeightManifest],
) -> None:
    key = serving[1].objects[0].key
    store.objects[key] = b"\0" + store.objects[key][1:]
    with pytest.raises(CorruptError):
        await receiver.stage(V[1])
    assert (receiver.status.live, receiver.status.staged) == (V[0], None)
    assert receiver.status.reason == "Corrupt"
    with pytest.raises(UnknownIdError):
        await receiver.stage(V[8])


async def test_a_staged_version_that_was_abandoned_meanwhile_is_not_committed(
    receiver: VersionFollower,
    engine: MemoryEngine,
    store: MemoryStore,
    serving: list[WeightManifest],
) -> None:
    await receiver.stage(V[1])
    weights.claim_epoch(store, holder="t", parent=V[0], reason="rollback")
    with pytest.raises(FencedError):
        await receiver.activate(V[1])
    assert engine.live == V[0]


async def test_rolling_back_drops_what_was_cached_and_is_not_undone_by_following(
    receiver: VersionFollower,
    engine: MemoryEngine,
    store: MemoryStore,
    serving: list[WeightManifest],
) -> None:
    await receiver.catch_up()
    assert engine.live == V[1]
    dropped = engine.dropped_caches
    weights.quarantine(store, V[1], reason="digest")
    status = await receiver.roll_back(V[0])
    assert (status.live, status.state_digest.hex()) == (V[0], serving[0].state)
    assert engine.dropped_caches == dropped + 1
    await receiver.catch_up()
    assert engine.live == V[0]
    assert (await receiver.roll_back(V[0])).live == V[0]


async def test_going_back_over_the_store_drops_what_was_cached(
    receiver: VersionFollower,
    engine: MemoryEngine,
    policy: TrainedPolicy,
    store: MemoryStore,
    serving: list[WeightManifest],
) -> None:
    policy.step()
    policy.publish(store, 2)
    await receiver.catch_up()
    dropped = engine.dropped_caches
    assert (await receiver.roll_back(V[0])).live == V[0]
    assert engine.dropped_caches == dropped + 1
    assert (await engine.swap.scan()).hex() == serving[0].state


async def test_a_pinned_replica_takes_up_nothing_newer_until_it_is_told(
    receiver: VersionFollower, engine: MemoryEngine, serving: list[WeightManifest]
) -> None:
    assert receiver.set_target(V[0]).target == V[0]
    await receiver.catch_up()
    assert engine.live == V[0]
    assert (await receiver.activate(V[1])).target == V[1]  # the pin moves along
    assert (await receiver.roll_back(V[0])).target == V[0]
    await receiver.catch_up()
    assert engine.live == V[0]
    assert receiver.set_target(None).target is None
    await receiver.catch_up()
    assert engine.live == V[1]


async def test_a_hint_is_looked_at_at_once_and_only_if_it_is_news(
    receiver: VersionFollower,
    engine: MemoryEngine,
    serving: list[WeightManifest],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(receivers, "POLL_S", 3_600.0)
    monkeypatch.setattr(receivers, "MAX_BACKOFF_S", 3_600.0)
    await receiver.catch_up()
    following = asyncio.create_task(receiver.follow(), name="follow")
    await asyncio.sleep(0.05)
    receiver.set_target(V[0])
    async with asyncio.timeout(10):
        async for status in receiver.watch():
            if status.live == V[0]:
                break
    receiver.target = None
    receiver.notify(V[0])
    await asyncio.sleep(0.05)
    assert engine.live == V[0]
    receiver.notify(V[1])
    async with asyncio.timeout(10):
        async for status in receiver.watch():
            if status.live == V[1]:
                break
    following.cancel()


def test_a_store_that_is_away_is_asked_more_often_than_for_a_version_that_it_refused() -> None:
    waits = [receivers.backoff_s(failures, StoreError.reason) for failures in range(100)]
    assert waits == sorted(waits)
    assert (waits[0], waits[-1]) == (receivers.POLL_S, receivers.MAX_STORE_BACKOFF_S)
    assert receivers.backoff_s(100, CorruptError.reason) == receivers.MAX_BACKOFF_S


async def test_damaged_memory_puts_all_since_the_last_sound_audit_in_doubt(
    receiver: VersionFollower,
    engine: MemoryEngine,
    policy: TrainedPolicy,
    store: MemoryStore,
    serving: list[WeightManifest],
) -> None:
    await receiver.catch_up()  # audited: the second commit
    for number in (2, 3):
        policy.step()
        policy.publish(store, number)
    await receiver.activate(V[2])
    engine.ranks.words[1]["a.q_proj.weight"][7] ^= 1
    with pytest.raises(UnavailableError, match="have state"):
        await receiver.activate(V[3])
    assert receiver.status.state is ReplicaState.NOT_READY
    assert receiver.status.suspect_since == V[1]
    (found,) = weights.list_suspects(store)
    assert (found.replica, found.since) == ("inference-0.ab12", V[1])


async def test_damage_is_reported_although_the_store_is_away_for_a_while(
    receiver: VersionFollower,
    engine: MemoryEngine,
    store: MemoryStore,
    serving: list[WeightManifest],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(audit, "REPORT_RETRY_S", 0.0)
    create, failures = store.create, [StoreError("503")] * 3

    def faulty(key: str, data: bytes) -> None:
        if failures:
            raise failures.pop()
        create(key, data)

    monkeypatch.setattr(MemoryStore, "create", lambda _store, key, data: faulty(key, data))
    engine.ranks.words[0]["a.q_proj.weight"][0] ^= 1
    with pytest.raises(UnavailableError):
        await receiver.activate(V[1])
    assert [each.since for each in weights.list_suspects(store)] == [V[0]]
