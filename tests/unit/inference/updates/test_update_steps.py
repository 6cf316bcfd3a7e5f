"""No request ever sees versions go down because something on the way is damaged."""

import errno
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.weights.followed_versions import add_keyframe, add_skip, assert_serves, damage
from tests.support.weights.publishing import TrainedPolicy

from etude.common import weights
from etude.common.blobs import MemoryStore
from etude.common.errors import CorruptError, UnavailableError
from etude.common.weights import Edge, VersionId, VersionRef, WeightManifest
from etude.inference.engine.fake import MemoryEngine
from etude.inference.status import ReplicaState
from etude.inference.updates.follower import VersionFollower
from etude.inference.updates.update_steps import split_path

V = [VersionId(1, number) for number in range(9)]


def ref(number: int) -> VersionRef:
    return VersionRef(epoch=1, number=number, manifest_sha256="0" * 64, state=f"{number:032x}")


@st.composite
def ways(draw: st.DrawFn) -> list[Edge]:
    """Ways that begin at a complete version."""
    numbers = sorted(draw(st.sets(st.integers(0, 20), min_size=1, max_size=6)))
    bases = [None, *map(ref, numbers)]
    return [
        Edge("delta" if base else "keyframe", base, ref(number), "0" * 64, ())
        for base, number in zip(bases, numbers, strict=False)
    ]


@given(way=ways(), live=st.integers(0, 20))
def test_nothing_but_the_end_of_a_way_goes_live_below_what_is_served(
    way: list[Edge], live: int
) -> None:
    legs = split_path(way, ref(live))
    assert [part for leg in legs for part in leg.parts] == way
    assert all(leg.edge.target == leg.parts[-1].target for leg in legs)
    shown = [leg.edge.target.number for leg in legs]
    assert all(number > live for number in shown[:-1])
    assert all(len(leg.parts) == 1 for leg in legs[1:])


@given(way=ways())
def test_a_replica_that_serves_nothing_takes_each_step_by_itself(way: list[Edge]) -> None:
    assert [leg.parts for leg in split_path(way, None)] == [(edge,) for edge in way]


@given(way=ways(), live=st.integers(0, 20))
def test_a_way_that_builds_on_what_is_live_is_taken_step_by_step(
    way: list[Edge], live: int
) -> None:
    assert [leg.parts for leg in split_path(way[1:], ref(live))] == [(edge,) for edge in way[1:]]


@pytest.fixture
async def published(
    receiver: VersionFollower,
    engine: MemoryEngine,
    policy: TrainedPolicy,
    store: MemoryStore,
    versions: list[WeightManifest],
) -> list[WeightManifest]:
    """Versions 0 to 4; 2 is live, 3 is damaged, and only what begins at 1 leads around it."""
    await receiver.catch_up()
    engine.activated.clear()
    found = list(versions)
    for number in (3, 4):
        policy.step()
        found.append(policy.publish(store, number))
    damage(store, found[3])
    add_keyframe(store, policy, found[1])
    add_skip(store, policy, found[1], found[4])
    return found


async def test_a_way_around_damage_goes_live_as_a_whole(
    receiver: VersionFollower,
    engine: MemoryEngine,
    policy: TrainedPolicy,
    published: list[WeightManifest],
    tmp_path: Path,
) -> None:
    await receiver.catch_up()
    assert engine.activated == [V[4]]
    assert_serves(engine, policy, V[4])
    assert engine.dropped_caches == 0
    assert receiver.status.state is ReplicaState.SERVING
    assert list((tmp_path / "staged").iterdir()) == []


async def test_what_follows_a_way_around_damage_is_taken_step_by_step_again(
    receiver: VersionFollower,
    engine: MemoryEngine,
    policy: TrainedPolicy,
    store: MemoryStore,
    published: list[WeightManifest],
) -> None:
    for number in (5, 6):
        policy.step()
        policy.publish(store, number)
    await receiver.catch_up()
    assert engine.activated == V[4:7]
    assert_serves(engine, policy, V[6])


async def test_damage_inside_a_way_around_leaves_the_live_version_serving(
    receiver: VersionFollower,
    engine: MemoryEngine,
    policy: TrainedPolicy,
    store: MemoryStore,
    published: list[WeightManifest],
    tmp_path: Path,
) -> None:
    skip = weights.read_skip(store, V[1], V[4])
    sound = store.objects[skip.objects[0].key]
    store.objects[skip.objects[0].key] = bytes([sound[0] ^ 1]) + sound[1:]
    with pytest.raises(CorruptError, match="blake3"):
        await receiver.catch_up()
    assert engine.activated == []
    assert_serves(engine, policy, V[2])
    assert (receiver.status.state, receiver.status.reason) == (ReplicaState.CATCHING_UP, "Corrupt")
    assert not (tmp_path / "staged" / "copy").exists()
    store.objects[skip.objects[0].key] = sound
    await receiver.catch_up()
    assert engine.activated == [V[4]]
    assert_serves(engine, policy, V[4])


async def test_a_damaged_complete_version_on_the_way_around_gives_way_to_an_older_one(
    receiver: VersionFollower,
    engine: MemoryEngine,
    policy: TrainedPolicy,
    store: MemoryStore,
    published: list[WeightManifest],
) -> None:
    keyframe = weights.read_keyframe(store, V[1])
    store.objects[keyframe.objects[0].key] = bytes(keyframe.objects[0].size)
    await receiver.catch_up()
    assert engine.activated == [V[4]]
    assert_serves(engine, policy, V[4])


async def test_a_scratch_disk_that_takes_no_copy_leaves_the_live_version_serving(
    receiver: VersionFollower,
    engine: MemoryEngine,
    policy: TrainedPolicy,
    published: list[WeightManifest],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        usage = shutil.disk_usage("/")._replace(free=100)
        patch.setattr(shutil, "disk_usage", lambda _: usage)
        with pytest.raises(UnavailableError, match=r"cannot stage version 1\.4: .*100 are free"):
            await receiver.catch_up()
    assert_serves(engine, policy, V[2])
    await receiver.catch_up()
    assert_serves(engine, policy, V[4])


async def test_a_scratch_disk_that_fills_up_under_the_copy_leaves_the_live_version_serving(
    receiver: VersionFollower,
    engine: MemoryEngine,
    policy: TrainedPolicy,
    published: list[WeightManifest],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(UnavailableError, match=r"cannot stage version 1\.4: .*No space left"):
            await receiver.catch_up()
    assert_serves(engine, policy, V[2])
    await receiver.catch_up()
    assert_serves(engine, policy, V[4])


def mapped_files() -> str:
    """What this process has mapped, removed or not."""
    return Path("/proc/self/maps").read_text()


async def test_a_copy_that_is_given_up_takes_no_disk_while_its_error_is_told(
    receiver: VersionFollower, store: MemoryStore, published: list[WeightManifest], tmp_path: Path
) -> None:
    skip = weights.read_skip(store, V[1], V[4])
    store.objects[skip.objects[0].key] = bytes(skip.objects[0].size)
    with pytest.raises(CorruptError):
        await receiver.catch_up()
    assert str(tmp_path) not in mapped_files()


async def test_a_rollback_over_versions_that_are_not_complete_shows_none_between(
    receiver: VersionFollower,
    engine: MemoryEngine,
    policy: TrainedPolicy,
    store: MemoryStore,
    versions: list[WeightManifest],
) -> None:
    policy.step()
    policy.publish(store, 3)
    await receiver.catch_up()
    engine.activated.clear()
    weights.claim_epoch(store, holder="t", parent=V[1], reason="rollback")
    await receiver.catch_up()
    assert engine.activated == [V[1]]
    assert_serves(engine, policy, V[1])
