"""A compactor that is killed, fenced or refused by its store breaks nothing, and is followed up."""

import contextlib
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.support.release.channel_records import ChannelWriter
from tests.support.stores.store_faults import Fault, FaultyStore, Schedule
from typing_extensions import Buffer, override

from etude.common import weights
from etude.common.blobs import MemoryStore, open_store
from etude.common.checkpoints import manifest
from etude.common.checkpoints.manifest import CheckpointId, CheckpointManifest, CheckpointObject
from etude.common.errors import FencedError
from etude.common.weights import VersionId
from etude.common.weights.protocol.listing import take_listing
from etude.common.weights.protocol.reader_leases import ReaderLease
from etude.common.weights.replicas.mirror import Mirror
from etude.common.weights.tensors.schema import Schema, TensorSpec

MakeCompactor = Callable[..., Any]


class KilledError(BaseException):
    """The process is gone: nothing catches it."""


@dataclass(slots=True)
class MortalStore(MemoryStore):
    """Whose caller dies before, or right after, one of its writes: reads change nothing."""

    calls_left: int = -1
    after: bool = False
    kills: int = field(default=0)

    def _step(self, *, before: bool) -> None:
        if before:
            self.calls_left -= 1
        if self.calls_left == 0 and before is not self.after:
            self.kills += 1
            self.calls_left = -1
            raise KilledError

    @override
    def put(self, key: str, data: Buffer) -> None:
        self._step(before=True)
        MemoryStore.put(self, key, data)
        self._step(before=False)

    @override
    def create(self, key: str, data: bytes) -> None:
        self._step(before=True)
        MemoryStore.create(self, key, data)
        self._step(before=False)

    @override
    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._step(before=True)
            MemoryStore.delete(self, [key])
            self._step(before=False)


def check(store: Any, trained: Any, folder: Path) -> None:
    """Whatever leads anywhere leads to what was published."""
    newest = weights.newest_version(store)
    assert newest is not None
    reader = Mirror(store, folder)
    reader.move_to(newest)
    assert trained.is_in(reader)
    listing = take_listing(store)
    for version, each in listing.keyframes.items():
        if each.record is not None and newest >= version:
            sizes = {info.key: info.size for info in each.parts}
            record = weights.read_keyframe(store, version)
            assert all(sizes[item.key] == item.size for item in record.objects)


@pytest.mark.parametrize("after", [False, True])
def test_killed_at_any_write_it_leaves_nothing_wrong_and_a_new_one_goes_on(
    trained: Any, keep: MakeCompactor, tmp_path: Path, *, after: bool
) -> None:
    at = 1
    settings = {"every": 2, "skips": [2], "retainVersions": 2, "retainKeyframes": 1}
    while True:
        store = MortalStore(objects=dict(trained.store.objects))
        policy = type(trained)(store, words=dict(trained.words), of=dict(trained.of))
        policy.manifest = trained.manifest
        compactor = keep(store, folder=f"k{at}{after}", part_bytes=20_000, **settings)
        compactor.run_round()
        for number in range(1, 5):
            policy.publish(number)
        store.calls_left, store.after = at, after
        with contextlib.suppress(KilledError):
            compactor.run_round()
            compactor.run_round()
        store.calls_left = -1
        check(store, policy, tmp_path / f"r{at}{after}")
        successor = keep(store, folder=f"k{at}{after}", part_bytes=20_000, **settings)
        for number in range(5, 9):
            policy.publish(number)
            assert successor.run_round().failures == ()
        check(store, policy, tmp_path / f"s{at}{after}")
        found = take_listing(store)
        newest = max(v for v, each in found.keyframes.items() if each.record is not None)
        assert newest >= VersionId(1, 6)
        if not store.kills:
            break
        at += 1
    assert at > 20


def test_rests_of_a_killed_compactor_are_swept_once_they_are_old(
    trained: Any, keep: MakeCompactor
) -> None:
    now = [0.0]
    store = trained.store
    store.clock = lambda: now[0]
    rest = weights.publish_keyframe_part(store, VersionId(1, 0), 0, b"half a keyframe")
    compactor = keep(store, every=2, retainVersions=2, retainKeyframes=1)
    for number in range(1, 5):
        trained.publish(number)
        compactor.run_round()
    assert store.head(rest) is not None  # it may be an upload in progress
    now[0] = 7200.0
    trained.publish(5)
    compactor.run_round()
    assert store.head(rest) is None


def test_a_fenced_compactor_stops_without_deleting_anything(
    trained: Any, keep: MakeCompactor
) -> None:
    compactor = keep(trained.store, every=2, retainVersions=2)
    compactor.run_round()
    for number in range(1, 6):
        trained.publish(number)
    trained.open(VersionId(1, 5), "takeover")
    before = dict(trained.store.objects)
    with pytest.raises(FencedError, match="epoch 2 was opened"):
        compactor.run_round()
    assert trained.store.objects == before


def test_a_store_that_is_away_fails_a_round_and_no_more(trained: Any, keep: MakeCompactor) -> None:
    faults = Schedule()
    compactor = keep(FaultyStore(trained.store, faults), every=2)
    compactor.run_round()
    faults.down(is_down=True)
    for number in (1, 2):
        trained.publish(number)
    report = compactor.run_round()
    assert {each.stage for each in report.failures} >= {"epoch"}
    assert report.written == ()
    faults.down(is_down=False)
    assert [each.kind for each in compactor.run_round().written] == ["keyframe"]


def test_a_keyframe_that_cannot_be_stored_becomes_overdue_and_is_tried_again(
    trained: Any, keep: MakeCompactor
) -> None:
    faults = Schedule(hits=lambda call, key: call == "put" and "keyframes" in key)
    compactor = keep(FaultyStore(trained.store, faults), every=2)
    compactor.run_round()
    faults.down(is_down=True)
    seen = []
    for number in range(1, 6):
        trained.publish(number)
        report = compactor.run_round()
        seen.append((report.is_overdue, bool(report.failures)))
    assert seen == [(False, False), (False, True), (False, True), (True, True), (True, True)]
    faults.down(is_down=False)
    report = compactor.run_round()
    assert not report.is_overdue
    assert report.failures == ()


def test_lost_replies_and_refusals_leave_a_chain_that_is_right(
    trained: Any, keep: MakeCompactor, tmp_path: Path
) -> None:
    rates = {Fault.UNAVAILABLE: 0.02, Fault.LOST_REPLY: 0.02}
    faults = Schedule(seed=5, rates=rates)
    store = FaultyStore(trained.store, faults)
    compactor = keep(store, every=3, skips=[2, 4], retainVersions=4, retainKeyframes=1)
    failures = 0
    for number in range(1, 31):
        trained.publish(number)
        failures += len(compactor.run_round().failures)
    assert failures
    check(trained.store, trained, tmp_path / "reader")
    assert max(take_listing(trained.store).keyframes) >= VersionId(1, 20)


def test_a_word_that_changed_on_disk_is_never_published(
    trained: Any, keep: MakeCompactor, tmp_path: Path
) -> None:
    compactor = keep(trained.store, every=2)
    compactor.run_round()
    trained.publish(1)
    compactor.run_round()
    compactor._open_copy().tensor_words["norm"][3] ^= 1
    trained.publish(2, density=0.0001)
    failed = compactor.run_round()
    assert [each.stage for each in failed.failures] == ["keyframe"]
    assert take_listing(trained.store).keyframes == {}
    assert [each.kind for each in compactor.run_round().written] == ["keyframe"]
    check(trained.store, trained, tmp_path / "reader")


def damage(store: Any, manifest: Any) -> None:
    key = manifest.objects[0].key
    data = store.get(key)
    store.objects[key] = bytes([data[0] ^ 1]) + data[1:]


@pytest.mark.parametrize("is_lost", [False, True], ids=["damaged", "lost"])
def test_a_delta_that_is_lost_for_good_cuts_readers_off_until_a_complete_version(
    trained: Any, keep: MakeCompactor, tmp_path: Path, *, is_lost: bool
) -> None:
    store = trained.store
    compactor = keep(store, every=3)
    assert compactor.run_round().cut_off_at is None
    broken = trained.publish(1)
    if is_lost:
        store.delete([broken.objects[0].key])
    else:
        damage(store, broken)
    for number in (2, 3):
        trained.publish(number)
        report = compactor.run_round()
        assert report.cut_off_at == VersionId(1, number)
        assert [each.stage for each in report.failures] == ["follow"]
    trained.publish(4, complete=True)
    for number in (5, 6, 7):
        trained.publish(number)
    report = compactor.run_round()
    assert report.cut_off_at is None
    assert report.failures == ()
    assert [each.target.number for each in report.written] == [7]
    check(store, trained, tmp_path / "reader")


def test_damage_that_something_leads_around_cuts_nobody_off(
    trained: Any, keep: MakeCompactor, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained.publish(1)
    keep(trained.store, every=1).run_round()
    trained.publish(2)
    damage(trained.store, weights.read_keyframe(trained.store, VersionId(1, 1)))
    other = keep(trained.store, folder=tmp_path / "other")
    assert other.run_round().cut_off_at is None
    assert other._open_copy().ref == trained.manifest.ref
    assert "took a detour around" in caplog.text


def test_a_compactor_whose_own_copy_is_damaged_does_not_blame_the_store(
    trained: Any, keep: MakeCompactor
) -> None:
    compactor = keep(trained.store)
    compactor.run_round()
    compactor._open_copy().tensor_words["norm"][3] ^= 1
    damage(trained.store, trained.publish(1))
    assert compactor.run_round().cut_off_at is None
    assert compactor.run_round().cut_off_at == VersionId(1, 1)


def test_greed_takes_nothing_from_a_reader_with_a_lease(
    trained: Any, keep: MakeCompactor, tmp_path: Path
) -> None:
    compactor = keep(trained.store, every=3, retainVersions=2, retainKeyframes=1)
    reader = Mirror(trained.store, tmp_path / "reader")
    reader.move_to(VersionId(1, 0))
    lease = ReaderLease(trained.store, "r0")
    lease.record_live(trained.manifest.ref)
    collected = 0
    for number in range(1, 20):
        trained.publish(number)
        lease.renew()
        collected += compactor.run_round().collected
    assert reader.move_to(VersionId(1, 19))[0].base is not None
    assert trained.is_in(reader)
    assert reader.ref is not None
    lease.record_live(reader.ref)
    assert compactor.run_round().collected > 20
    trained.publish(20)
    assert [edge.kind for edge in reader.move_to(VersionId(1, 20))] == ["delta"]
    assert trained.is_in(reader)


def test_greed_takes_nothing_that_a_checkpoint_needs(
    trained: Any, keep: MakeCompactor, tmp_path: Path
) -> None:
    store = trained.store
    for number in range(1, 6):
        trained.publish(number)
    manifest.write_manifest(store, _checkpoint(step=5, version=5))
    compactor = keep(store, every=3, retainVersions=2, retainKeyframes=1)
    for number in range(6, 20):
        trained.publish(number)
        assert compactor.run_round().failures == ()
    fresh = Mirror(store, tmp_path / "fresh")
    fresh.move_to(VersionId(1, 5))
    assert trained.is_in(fresh)
    store.delete([info.key for info in store.list(CheckpointId(0, 5).prefix)])
    assert compactor.run_round().collected > 0
    assert not weights.is_reachable(store, VersionId(1, 5))


def test_greed_takes_nothing_that_a_channel_serves_or_goes_back_to(
    trained: Any, keep: MakeCompactor, tmp_path: Path
) -> None:
    store = trained.store
    for number in range(1, 6):
        trained.publish(number)
    channel = ChannelWriter(store, "stable", run_uid="run")
    channel.serve(5)
    compactor = keep(store, every=3, retainVersions=2, retainKeyframes=1)
    for number in range(6, 24):
        trained.publish(number)
        assert compactor.run_round().failures == ()
        if number == 13:
            channel.serve(13)
    chain = {version.number for version in weights.accepted_chain(store)}
    assert {5, 13, 23} <= chain
    assert chain.isdisjoint({8, 9, 10, 16, 17, 18})
    fresh = Mirror(store, tmp_path / "fresh")
    for number in (13, 5, 23):
        fresh.move_to(VersionId(1, number))
        assert trained.is_in(fresh)
    channel.serve(22)
    assert compactor.run_round().collected > 0
    assert not weights.is_reachable(store, VersionId(1, 5))
    fresh.move_to(VersionId(1, 13))


def _checkpoint(*, step: int, version: int) -> CheckpointManifest:
    item = CheckpointObject(key="x", size=1, blake3="0" * 64)
    return CheckpointManifest(
        run="run",
        step=step,
        phase="rl",
        phase_step=step,
        epoch=1,
        policy_version=version,
        reason="Scheduled",
        objects=[item],
    )


def test_a_round_holds_parts_in_memory_and_no_copy_of_the_model(
    trained: Any, keep: MakeCompactor, tmp_path: Path
) -> None:
    spec = TensorSpec(name="w", dtype="BF16", shape=(8192, 1024), split="rows")
    large = type(trained)(open_store(f"file://{tmp_path}/store"), Schema(grid=1, tensors=(spec,)))
    large.open()
    large.publish(0)
    compactor = keep(large.store, every=4, skips=[2, 4])
    compactor.run_round()
    for number in range(1, 4):
        large.publish(number, density=0.001)
    compactor.run_round()
    large.publish(4, density=0.001)
    tracemalloc.start()
    report = compactor.run_round()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [each.kind for each in report.written] == ["skip", "skip", "keyframe"]
    assert peak < spec.num_bytes
