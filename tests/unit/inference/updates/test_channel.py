"""An engine of a channel serves exactly the version that the newest record names."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY
from tests.support.release.channel_records import ChannelWriter
from tests.support.weights.followed_versions import add_keyframe, assert_serves, damage
from tests.support.weights.publishing import TrainedPolicy

from etude.common import weights
from etude.common.blobs import MemoryStore, StoreRefusedError
from etude.common.errors import CorruptError, StoreError, UnknownIdError, WrongStateError
from etude.common.release.channels import STABLE, channel_key
from etude.common.weights import MAX_LAG, VersionId, WeightManifest
from etude.common.weights.coding.codecs.ids import Codec
from etude.inference.engine.fake import MemoryEngine
from etude.inference.status import ReplicaState, ReplicaStatus
from etude.inference.updates import channel
from etude.inference.updates.channel import SERVES_NOTHING, FollowedChannel
from etude.inference.updates.follower import VersionFollower
from etude.inference.updates.staging import Stager

RUN = "uid-run"


@dataclass
class Followed:
    """An engine in memory that follows a channel, and the run whose versions it serves."""

    follower: VersionFollower
    engine: MemoryEngine
    policy: TrainedPolicy
    store: MemoryStore
    channel: ChannelWriter

    def publish(self, number: int, **how: Any) -> WeightManifest:
        self.policy.step()
        return self.policy.publish(self.store, number, **how)

    async def serve(self, number: int | None, **how: Any) -> None:
        """Decide what the channel serves, and let the engine follow."""
        self.channel.serve(number, **how)
        await self.follower.catch_up()

    def assert_serves(self, number: int, *, epoch: int = 1) -> None:
        assert_serves(self.engine, self.policy, VersionId(epoch, number))
        assert self.follower.status.is_ready


@pytest.fixture
def followed(
    store: MemoryStore, engine: MemoryEngine, policy: TrainedPolicy, tmp_path: Path
) -> Followed:
    follower = VersionFollower(
        stager=Stager(store, RUN, tmp_path),
        engine=engine,
        status=ReplicaStatus(replica="tiny-stable-0"),
        channel=FollowedChannel(store=store, name=STABLE, run_uid=RUN),
    )
    return Followed(follower, engine, policy, store, ChannelWriter(store, STABLE, run_uid=RUN))


def read_metric(name: str) -> float | None:
    return REGISTRY.get_sample_value(name, {"channel": STABLE})


async def test_only_versions_of_records_are_ever_live(followed: Followed) -> None:
    for number in range(6):
        followed.publish(number)
    for number in (2, 5, 3, 4):
        await followed.serve(number)
        followed.assert_serves(number)
    assert [version.number for version in followed.engine.activated] == [2, 5, 3, 4]
    status = followed.follower.status
    assert (status.state, status.reason) == (ReplicaState.SERVING, "")
    assert read_metric("etude_channel_record") == 4
    assert read_metric("etude_channel_followed") == 1


async def test_a_roll_back_restores_the_words_before_without_the_store(followed: Followed) -> None:
    payloads = [item.key for number in range(3) for item in followed.publish(number).objects]
    for number in (0, 2):
        await followed.serve(number)
    for key in payloads:
        del followed.store.objects[key]
    await followed.serve(0)
    followed.assert_serves(0)
    assert followed.engine.dropped_caches == 1


def count_reseeds() -> float:
    sample = "etude_weights_reseed_total"
    return REGISTRY.get_sample_value(sample, {"reason": "behind"}) or 0.0


async def test_a_path_of_deltas_is_one_small_step(followed: Followed) -> None:
    for number in range(5):
        followed.publish(number)
    await followed.serve(0)
    reseeds = count_reseeds()
    await followed.serve(4)
    followed.assert_serves(4)
    assert count_reseeds() == reseeds
    assert followed.engine.activated == [VersionId(1, 0), VersionId(1, 4)]
    assert followed.follower.status.undo_depth == 1


async def test_deltas_that_cannot_be_folded_are_applied_to_a_complete_version(
    followed: Followed,
) -> None:
    followed.policy.codec = Codec.L2
    for number in range(5):
        followed.publish(number)
    await followed.serve(1)
    reseeds = count_reseeds()
    for number in (4, 2):
        await followed.serve(number)
        followed.assert_serves(number)
    assert count_reseeds() == reseeds + 2
    assert [version.number for version in followed.engine.activated] == [1, 4, 2]


async def test_a_damaged_delta_on_the_way_is_gone_around(followed: Followed) -> None:
    manifests = [followed.publish(number) for number in range(5)]
    add_keyframe(followed.store, followed.policy, manifests[3])
    await followed.serve(1)
    damage(followed.store, manifests[2])
    await followed.serve(4)
    followed.assert_serves(4)


async def test_an_engine_far_behind_its_run_stays_ready(followed: Followed) -> None:
    followed.publish(0)
    await followed.serve(0)
    far = 4 * MAX_LAG
    for number in range(1, far + 1):
        followed.publish(number)
    await followed.follower.catch_up()
    status = followed.follower.status
    assert (status.state, status.reason) == (ReplicaState.SERVING, "")
    followed.channel.serve(far)
    moving = asyncio.create_task(followed.follower.catch_up(), name="catch-up")
    seen = []
    async for status in followed.follower.watch():
        seen.append(status.is_ready)
        if status.live == VersionId(1, far) and status.state is ReplicaState.SERVING:
            break
    await moving
    assert len(seen) > 1
    assert all(seen)


async def test_a_channel_without_a_record_serves_nothing(followed: Followed) -> None:
    followed.publish(0)
    await followed.follower.catch_up()
    assert followed.engine.live is None
    status = followed.follower.status
    assert (status.state, status.reason) == (ReplicaState.LOADING, SERVES_NOTHING)
    assert "no record yet" in status.message


async def test_a_channel_that_stops_serving_leaves_the_weights(followed: Followed) -> None:
    followed.publish(0)
    await followed.serve(0)
    await followed.serve(None)
    followed.assert_serves(0)
    assert followed.follower.status.reason == SERVES_NOTHING
    assert "since record 2" in followed.follower.status.message
    assert read_metric("etude_channel_followed") == 1
    await followed.serve(0)
    status = followed.follower.status
    assert (status.state, status.reason) == (ReplicaState.SERVING, "")


def drop_payload(store: MemoryStore, manifest: WeightManifest) -> None:
    del store.objects[manifest.objects[0].key]


def drop_manifest(store: MemoryStore, manifest: WeightManifest) -> None:
    del store.objects[manifest.version.manifest_key]


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [(damage, "Corrupt"), (drop_payload, "NotFound"), (drop_manifest, "NotFound")],
)
async def test_a_version_that_cannot_be_loaded_leaves_the_one_before_serving(
    followed: Followed, spoil: Callable[[MemoryStore, WeightManifest], None], reason: str
) -> None:
    followed.publish(0)
    await followed.serve(0)
    spoil(followed.store, followed.publish(1))
    with pytest.raises((CorruptError, UnknownIdError)):
        await followed.serve(1)
    followed.assert_serves(0)
    status = followed.follower.status
    assert (status.reason, status.target) == (reason, VersionId(1, 1))
    assert "000000000001" in status.message
    assert read_metric("etude_channel_followed") == 0


async def test_a_roll_back_does_not_wait_for_the_retry_of_a_version(
    followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "POLL_S", 0.01)
    for number in range(2):
        followed.publish(number)
    await followed.serve(0)
    drop_manifest(followed.store, followed.publish(2))
    with pytest.raises(UnknownIdError):
        await followed.serve(2)
    followed.channel.serve(1)
    assert followed.follower.channel is not None
    async with asyncio.timeout(60):
        await followed.follower.channel.wait(delay_s=3600)
    await followed.follower.catch_up()
    followed.assert_serves(1)


async def test_a_record_of_another_run_is_refused_by_name(followed: Followed) -> None:
    followed.publish(0)
    await followed.serve(0)
    followed.publish(1)
    ChannelWriter(followed.store, STABLE, run_uid="uid-other", number=1).serve(1)
    for _ in range(2):
        with pytest.raises(CorruptError, match="of run uid-other, not uid-run"):
            await followed.follower.catch_up()
    followed.assert_serves(0)
    assert read_metric("etude_channel_followed") == 0


async def test_a_damaged_record_leaves_the_one_before_it_in_force(followed: Followed) -> None:
    followed.publish(0)
    await followed.serve(0)
    followed.store.put(channel_key(STABLE, 2), b"{}")
    with pytest.raises(CorruptError):
        await followed.follower.catch_up()
    followed.assert_serves(0)
    followed.channel.number = 2
    await followed.serve(0)
    assert followed.follower.status.reason == ""


@pytest.mark.parametrize("spoiled", ["damaged", "of another run"])
async def test_an_engine_that_starts_serves_the_newest_record_that_can_be_used(
    followed: Followed, spoiled: str
) -> None:
    for number in range(2):
        followed.publish(number)
    for number in (0, 1):
        followed.channel.serve(number)
    if spoiled == "damaged":
        followed.store.put(channel_key(STABLE, 3), b"{}")
    else:
        ChannelWriter(followed.store, STABLE, run_uid="uid-other", number=2).serve(1)
    await followed.follower.catch_up()
    followed.assert_serves(1)
    assert [version.number for version in followed.engine.activated] == [1]
    with pytest.raises(CorruptError):
        await followed.follower.catch_up()
    assert read_metric("etude_channel_record") == 2
    assert read_metric("etude_channel_followed") == 0
    followed.channel.number = 3
    await followed.serve(0)
    followed.assert_serves(0)


async def test_without_a_record_that_can_be_used_nothing_is_served(followed: Followed) -> None:
    followed.publish(0)
    followed.store.put(channel_key(STABLE, 1), b"{}")
    with pytest.raises(CorruptError):
        await followed.follower.catch_up()
    assert followed.engine.live is None


async def test_serving_goes_on_while_the_store_is_away(
    followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise StoreError("the store is away")

    followed.publish(0)
    await followed.serve(0)
    with monkeypatch.context() as patch:
        patch.setattr(MemoryStore, "list", fail)
        with pytest.raises(StoreError):
            await followed.follower.catch_up()
    followed.assert_serves(0)


async def test_a_served_version_that_its_run_abandoned_can_still_be_loaded(
    followed: Followed,
) -> None:
    first = followed.publish(0)
    for number in (1, 2):
        followed.publish(number)
    weights.claim_epoch(followed.store, holder="t", parent=VersionId(1, 0), reason="rollback")
    followed.policy.resume(first.ref)
    followed.publish(3, epoch=2)
    await followed.serve(2)
    followed.assert_serves(2)
    await followed.serve(3, epoch=2)
    followed.assert_serves(3, epoch=2)


async def test_a_trainer_cannot_order_an_engine_of_a_channel(followed: Followed) -> None:
    followed.publish(0)
    await followed.serve(0)
    newer, follower = followed.publish(1).version, followed.follower
    follower.notify(newer)
    for order in (follower.activate, follower.stage, follower.roll_back):
        with pytest.raises(WrongStateError, match="follows channel 'stable'"):
            await order(newer)
    with pytest.raises(WrongStateError, match="follows channel 'stable'"):
        follower.set_target(newer)
    await follower.catch_up()
    followed.assert_serves(0)


async def test_an_engine_of_a_channel_holds_no_versions_for_later(followed: Followed) -> None:
    followed.publish(0)
    followed.publish(1)
    await followed.serve(1)
    assert list(followed.store.list("weights/leases/")) == []


async def test_an_engine_that_may_delete_nothing_follows_all_the_same(
    followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def deny(*_: object) -> None:
        raise StoreRefusedError("DeleteObject is denied")

    monkeypatch.setattr(MemoryStore, "delete", deny)
    followed.publish(0)
    await followed.serve(0)
    followed.assert_serves(0)
    assert followed.follower.status.reason == ""
