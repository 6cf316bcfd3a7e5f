"""Ranks that fail are asked again, then given a complete version, then said not to be ready."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY
from tests.support.weights.followed_versions import add_keyframe, assert_serves, damage
from tests.support.weights.publishing import TrainedPolicy
from typing_extensions import override

from etude.common.blobs import MemoryStore
from etude.common.errors import EtudeError, StoreError, UnavailableError
from etude.common.weights import VersionId, WeightManifest
from etude.inference.engine.fake import MemoryEngine
from etude.inference.status import ReplicaState
from etude.inference.swap.ranks import RankError
from etude.inference.updates import updater
from etude.inference.updates.follower import VersionFollower
from etude.inference.updates.updater import UpdateFailures, UpdateRemedy

V = [VersionId(1, number) for number in range(9)]

EVENTS = st.lists(st.sampled_from(["prepare", "activate", "way"]))


def after(*events: str) -> UpdateFailures:
    found = UpdateFailures()
    for event in events:
        match event:
            case "prepare":
                found = found.add_prepare()
            case "activate":
                found = found.add_activation()
            case _:
                found = found.add_path()
    return found


@pytest.mark.parametrize(
    ("events", "remedy"),
    [
        ((), UpdateRemedy.RETRY),
        (("prepare", "prepare"), UpdateRemedy.RETRY),
        (("prepare", "prepare", "prepare"), UpdateRemedy.RESEED),
        (("activate",), UpdateRemedy.RETRY),
        (("activate", "activate"), UpdateRemedy.RESEED),
        (("prepare", "prepare", "activate"), UpdateRemedy.RETRY),
        (("way", "way", "way", "way"), UpdateRemedy.RETRY),
        (("activate", "activate", "prepare"), UpdateRemedy.GIVE_UP),
        (("activate", "activate", "way"), UpdateRemedy.GIVE_UP),
        (("prepare", "prepare", "prepare", "activate", "activate"), UpdateRemedy.GIVE_UP),
    ],
)
def test_the_third_prepare_and_the_second_commit_that_fail_ask_for_a_complete_version(
    events: tuple[str, ...], remedy: UpdateRemedy
) -> None:
    assert after(*events).remedy is remedy


@given(events=EVENTS, more=EVENTS)
def test_more_failures_never_ask_for_less(events: list[str], more: list[str]) -> None:
    order = list(UpdateRemedy)
    before, then = after(*events), after(*events, *more)
    assert order.index(then.remedy) >= order.index(before.remedy)
    if before.remedy is not UpdateRemedy.RETRY:
        assert then.reason == before.reason


async def fails(receiver: VersionFollower, engine: MemoryEngine, method: str, words: str) -> None:
    engine.ranks.fail[method] = 1
    with pytest.raises(RankError, match=words):
        await receiver.catch_up()
    assert method not in engine.ranks.fail


def reseeds(reason: str) -> float:
    return REGISTRY.get_sample_value("etude_weights_reseed_total", {"reason": reason}) or 0.0


@pytest.fixture
async def behind(
    receiver: VersionFollower,
    policy: TrainedPolicy,
    store: MemoryStore,
    versions: list[WeightManifest],
) -> WeightManifest:
    """Version 2 is live; version 3 is published, and a complete copy of it."""
    await receiver.catch_up()
    policy.step()
    manifest = policy.publish(store, 3)
    add_keyframe(store, policy, manifest)
    return manifest


@pytest.fixture
def unprepared(engine: MemoryEngine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Errors that ranks answer to the next prepares, one each."""
    errors: list[str] = []
    call = engine.ranks.call

    async def answer(method: str, *args: object) -> object:
        answers = list(await call(method, *args))
        if method == "poll_prepared" and errors:
            if None in answers:  # an answer that was heard once is not asked for again
                return [None] * len(answers)
            answers[1] = {"error": errors.pop(), "is_corrupt": False}
        return answers

    monkeypatch.setattr(engine.ranks, "call", answer)
    return errors


async def test_ranks_that_fail_to_commit_twice_are_given_a_complete_version(
    receiver: VersionFollower, engine: MemoryEngine, policy: TrainedPolicy, behind: WeightManifest
) -> None:
    before = reseeds("commit_failed")
    for _ in range(2):
        await fails(receiver, engine, "activate", "rank 1")
        assert_serves(engine, policy, V[2])
        assert (receiver.status.state, receiver.status.is_ready) == (ReplicaState.CATCHING_UP, True)
    assert reseeds("commit_failed") == before
    await receiver.catch_up()
    assert reseeds("commit_failed") == before + 1
    assert_serves(engine, policy, V[3])
    assert (receiver.status.state, receiver.status.reason) == (ReplicaState.SERVING, "")


async def test_ranks_that_fail_to_prepare_three_times_are_given_a_complete_version(
    receiver: VersionFollower,
    engine: MemoryEngine,
    policy: TrainedPolicy,
    behind: WeightManifest,
    unprepared: list[str],
) -> None:
    before = reseeds("prepare_failed")
    for _ in range(3):
        unprepared.append("no memory")
        with pytest.raises(RankError, match="rank 1: no memory"):
            await receiver.catch_up()
        assert receiver.status.is_ready
    assert reseeds("prepare_failed") == before
    await receiver.catch_up()
    assert reseeds("prepare_failed") == before + 1
    assert_serves(engine, policy, V[3])


async def test_a_replica_that_cannot_load_a_complete_version_either_is_not_ready_until_it_can(
    receiver: VersionFollower, engine: MemoryEngine, policy: TrainedPolicy, behind: WeightManifest
) -> None:
    for _ in range(3):
        await fails(receiver, engine, "activate", "rank 1")
    assert_serves(engine, policy, V[2])
    assert (receiver.status.state, receiver.status.reason) == (
        ReplicaState.NOT_READY,
        "Unavailable",
    )
    assert "rank 1" in receiver.status.message
    await fails(receiver, engine, "activate", "rank 1")
    assert receiver.status.state is ReplicaState.NOT_READY
    await receiver.catch_up()
    assert_serves(engine, policy, V[3])
    assert (receiver.status.state, receiver.status.reason) == (ReplicaState.SERVING, "")


async def test_without_a_newer_complete_version_an_older_one_is_brought_up_on_disk(
    receiver: VersionFollower,
    engine: MemoryEngine,
    policy: TrainedPolicy,
    store: MemoryStore,
    versions: list[WeightManifest],
) -> None:
    await receiver.catch_up()
    policy.step()
    policy.publish(store, 3)
    for _ in range(2):
        await fails(receiver, engine, "activate", "rank 1")
    engine.activated.clear()
    await receiver.catch_up()
    assert engine.activated == [V[3]]
    assert_serves(engine, policy, V[3])
    assert receiver.status.state is ReplicaState.SERVING


async def test_no_complete_version_that_is_sound_leaves_a_replica_not_ready_and_says_so(
    receiver: VersionFollower,
    engine: MemoryEngine,
    policy: TrainedPolicy,
    store: MemoryStore,
    versions: list[WeightManifest],
) -> None:
    await receiver.catch_up()
    policy.step()
    policy.publish(store, 3)
    damage(store, versions[0])
    for _ in range(2):
        await fails(receiver, engine, "activate", "rank 1")
    with pytest.raises(EtudeError, match="blake3"):
        await receiver.catch_up()
    assert_serves(engine, policy, V[2])
    assert (receiver.status.state, receiver.status.reason) == (ReplicaState.NOT_READY, "Corrupt")


async def test_failures_of_versions_that_went_live_since_do_not_add_up(
    receiver: VersionFollower,
    engine: MemoryEngine,
    policy: TrainedPolicy,
    store: MemoryStore,
    versions: list[WeightManifest],
) -> None:
    await receiver.catch_up()
    before = reseeds("commit_failed")
    for number in (3, 4, 5):
        policy.step()
        policy.publish(store, number)
        await fails(receiver, engine, "activate", "rank 1")
        await receiver.catch_up()
        assert_serves(engine, policy, V[number])
    assert reseeds("commit_failed") == before


async def test_a_store_that_is_away_is_no_failure_of_ranks(
    receiver: VersionFollower,
    engine: MemoryEngine,
    behind: WeightManifest,
    store: MemoryStore,
) -> None:
    before = [reseeds(reason) for reason in ("commit_failed", "prepare_failed")]
    receiver.stager.store = Unreadable(objects=store.objects)
    for _ in range(4):
        with pytest.raises(StoreError):
            await receiver.catch_up()
    assert receiver.status.is_ready
    receiver.stager.store = store
    await receiver.catch_up()
    assert [reseeds(reason) for reason in ("commit_failed", "prepare_failed")] == before


async def test_replicas_that_swap_together_are_given_a_complete_version_too(
    receiver: VersionFollower,
    engine: MemoryEngine,
    policy: TrainedPolicy,
    behind: WeightManifest,
    unprepared: list[str],
) -> None:
    receiver.set_target(V[2])
    for _ in range(3):
        unprepared.append("no memory")
        with pytest.raises(RankError):
            await receiver.stage(V[3])
        await receiver.catch_up()
    before = reseeds("prepare_failed")
    unprepared.append("no memory")
    with pytest.raises(RankError):
        await receiver.stage(V[3])
    await receiver.catch_up()
    assert (receiver.status.live, receiver.status.state) == (V[2], ReplicaState.NOT_READY)
    status = await receiver.stage(V[3])
    assert (status.live, status.staged) == (V[2], V[3])
    assert reseeds("prepare_failed") == before + 2
    await receiver.activate(V[3])
    assert receiver.status.is_ready
    assert_serves(engine, policy, V[3])


async def test_a_complete_version_too_large_to_be_undone_that_fails_half_way_ends_the_engine(
    receiver: VersionFollower,
    engine: MemoryEngine,
    behind: WeightManifest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(updater, "UNDO_LIMIT_BYTES", 0)
    for _ in range(2):
        await fails(receiver, engine, "activate", "rank 1")
    await fails(receiver, engine, "activate", "rank 1")
    assert "too large to keep the old words" in engine.failed
    assert not engine.is_thawed  # no forward pass sees what is half one version, half another
    assert receiver.status.state is ReplicaState.NOT_READY
    with pytest.raises(UnavailableError, match="too large to keep the old words"):
        await receiver.follow()


class Unreadable(MemoryStore):
    """Lists what it has, but gives no payload."""

    @override
    def view(self, key: str, start: int, length: int) -> memoryview:
        if not key.endswith(".json"):
            raise StoreError("503")
        return super().view(key, start, length)
