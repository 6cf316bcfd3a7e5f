"""A replica far behind gets no new requests; one whose store is away serves on."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY
from tests.support.weights.followed_versions import assert_serves, damage
from tests.support.weights.publishing import TrainedPolicy
from typing_extensions import override

from etude.common import weights
from etude.common.blobs import MemoryStore, ObjectInfo
from etude.common.errors import CorruptError, StoreError, UnavailableError
from etude.common.weights import MAX_LAG, VersionId
from etude.inference.engine.fake import MemoryEngine
from etude.inference.status import ReplicaState, ReplicaStatus
from etude.inference.updates import follower as updates_lag
from etude.inference.updates.follower import READY_LAG, VersionFollower

NUMBERS = st.integers(0, 60)


@given(numbers=st.sets(NUMBERS), live=NUMBERS, wanted=NUMBERS)
def test_the_lag_is_counted_along_the_chain_and_never_above_the_numbers(
    numbers: set[int], live: int, wanted: int
) -> None:
    chain = [VersionId(1, number) for number in sorted(numbers)]
    found = updates_lag.lag_versions(VersionId(1, live), VersionId(1, wanted), chain)
    assert found == len(numbers & set(range(live + 1, wanted + 1)))
    assert found <= max(0, wanted - live)


@given(lag=NUMBERS)
def test_it_takes_more_to_leave_than_to_join(lag: int) -> None:
    assert updates_lag.is_near(lag, was_near=False) == (lag <= READY_LAG)
    assert updates_lag.is_near(lag, was_near=True) == (lag <= MAX_LAG)


def publish(policy: TrainedPolicy, store: MemoryStore, numbers: range) -> None:
    for number in numbers:
        policy.step(0.02)
        policy.publish(store, number, complete=number == 0)


async def seen_while(
    receiver: VersionFollower, last: VersionId, move: Callable[[], Awaitable[object]] | None = None
) -> list[ReplicaStatus]:
    """Every status up to a version being live, by following unless told otherwise."""
    seen: list[ReplicaStatus] = []

    async def watch() -> None:
        async for status in receiver.watch():
            seen.append(status)  # noqa: PERF401 - the stream does not end

    watching = asyncio.create_task(watch(), name="watch")
    await asyncio.sleep(0)
    await (move or receiver.catch_up)()
    await asyncio.sleep(0)
    watching.cancel()
    assert seen[-1].live == last
    return seen


def far_behind(seen: list[ReplicaStatus], tip: int, limit: int) -> list[ReplicaStatus]:
    return [each for each in seen if each.live and tip - each.live.number > limit]


async def test_a_joiner_is_ready_only_when_it_is_near(
    receiver: VersionFollower, engine: MemoryEngine, policy: TrainedPolicy, store: MemoryStore
) -> None:
    publish(policy, store, range(30))
    seen = await seen_while(receiver, VersionId(1, 29))
    far = far_behind(seen, 29, READY_LAG)
    assert far
    assert not any(each.is_ready for each in far)
    assert {(each.state, each.reason) for each in far} == {
        (ReplicaState.NOT_READY, "ReplicaLagging")
    }
    assert "too far behind version 1.29" in far[0].message
    assert (receiver.status.is_ready, receiver.status.reason) == (True, "")
    assert_serves(engine, policy, VersionId(1, 29))


async def test_a_replica_stays_ready_up_to_a_larger_lag(
    receiver: VersionFollower, policy: TrainedPolicy, store: MemoryStore
) -> None:
    publish(policy, store, range(3))
    await receiver.catch_up()
    publish(policy, store, range(3, 3 + MAX_LAG))
    assert all(each.is_ready for each in await seen_while(receiver, VersionId(1, 2 + MAX_LAG)))
    publish(policy, store, range(3 + MAX_LAG, 4 + 2 * MAX_LAG))
    tip = 3 + 2 * MAX_LAG
    seen = await seen_while(receiver, VersionId(1, tip))
    near = [each for each in seen if each.live and tip - each.live.number <= READY_LAG]
    assert not any(each.is_ready for each in seen[1:] if each not in near)
    assert near[-1].is_ready


async def test_a_replica_that_cannot_go_on_is_not_ready_once_it_is_far_behind(
    receiver: VersionFollower, engine: MemoryEngine, policy: TrainedPolicy, store: MemoryStore
) -> None:
    publish(policy, store, range(3))
    await receiver.catch_up()
    sound, receiver.stager.scratch = receiver.stager.scratch, receiver.stager.scratch / "no-folder"
    receiver.stager.scratch.touch()
    for number in range(3, 12):
        publish(policy, store, range(number, number + 1))
        with pytest.raises(UnavailableError, match="cannot stage"):
            await receiver.catch_up()
        assert receiver.status.is_ready == (number - 2 <= MAX_LAG)
        assert receiver.status.reason == "Unavailable"
    labels = {"replica": "tiny-inference-0"}
    assert REGISTRY.get_sample_value("etude_weights_lag_versions", labels) == 9
    receiver.stager.scratch = sound
    await receiver.catch_up()
    assert (receiver.status.state, receiver.status.reason) == (ReplicaState.SERVING, "")
    assert REGISTRY.get_sample_value("etude_weights_lag_versions", labels) == 0


async def test_replicas_whose_store_is_away_stay_ready(
    receiver: VersionFollower, policy: TrainedPolicy, store: MemoryStore
) -> None:
    publish(policy, store, range(3))
    await receiver.catch_up()
    publish(policy, store, range(3, 30))
    receiver.stager.store = Away()
    for _ in range(20):
        with pytest.raises(StoreError):
            await receiver.catch_up()
        assert (receiver.status.is_ready, receiver.status.reason) == (True, "StorageUnavailable")


async def test_numbers_that_a_resume_left_out_are_no_lag(
    receiver: VersionFollower, engine: MemoryEngine, policy: TrainedPolicy, store: MemoryStore
) -> None:
    publish(policy, store, range(3))
    await receiver.catch_up()
    parent = policy.base
    assert parent is not None
    weights.claim_epoch(store, holder="t", parent=parent.version, reason="takeover")
    policy.step()
    policy.publish(store, 91, epoch=2)
    seen = await seen_while(receiver, VersionId(2, 91))
    assert all(each.is_ready for each in seen)
    assert_serves(engine, policy, VersionId(2, 91))


async def test_a_replica_that_stages_what_is_far_ahead_is_not_ready_until_it_is_near(
    receiver: VersionFollower, policy: TrainedPolicy, store: MemoryStore
) -> None:
    publish(policy, store, range(3))
    await receiver.catch_up()
    publish(policy, store, range(3, 30))
    seen = await seen_while(receiver, VersionId(1, 28), lambda: receiver.stage(VersionId(1, 29)))
    far = far_behind(seen[1:], 29, READY_LAG)
    assert far
    assert not any(each.is_ready for each in far)
    assert (receiver.status.is_ready, receiver.status.staged) == (True, VersionId(1, 29))


async def test_a_replica_that_is_told_to_serve_what_it_has_is_near_it(
    receiver: VersionFollower, policy: TrainedPolicy, store: MemoryStore
) -> None:
    publish(policy, store, range(30))
    damage(store, weights.read_manifest(store, VersionId(1, 5)))
    with pytest.raises(CorruptError):
        await receiver.catch_up()
    assert (receiver.status.live, receiver.status.is_ready) == (VersionId(1, 4), False)
    receiver.set_target(VersionId(1, 4))
    await receiver.catch_up()
    assert (receiver.status.state, receiver.status.reason) == (ReplicaState.SERVING, "")
    receiver.stager.store = Away()
    with pytest.raises(StoreError):
        await receiver.catch_up()
    assert receiver.status.is_ready


async def test_a_replica_that_is_pinned_does_not_lag(
    receiver: VersionFollower, policy: TrainedPolicy, store: MemoryStore
) -> None:
    publish(policy, store, range(3))
    await receiver.catch_up()
    receiver.set_target(VersionId(1, 2))
    publish(policy, store, range(3, 30))
    await receiver.catch_up()
    assert (receiver.status.state, receiver.status.live) == (ReplicaState.SERVING, VersionId(1, 2))


class Away(MemoryStore):
    """Answers nothing."""

    @override
    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        raise StoreError("connection refused")
