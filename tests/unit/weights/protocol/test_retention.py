"""What may be deleted, and how."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from typing_extensions import override

from etude.common import weights
from etude.common.blobs import MemoryStore, ObjectInfo
from etude.common.errors import FencedError, StoreError
from etude.common.weights import GarbageCollector, ReaderLease, Retention, VersionId
from etude.common.weights.protocol import versions
from etude.common.weights.protocol.garbage_collector import MAX_IDLE_ROUNDS
from etude.common.weights.protocol.retention import ORPHAN_S
from etude.common.weights.protocol.tombstones import read_trash

V = [VersionId(1, number) for number in range(40)]


def collector(
    store: MemoryStore,
    *,
    epoch: int = 1,
    resumable: Collection[VersionId] = (),
    versions: int = 1,
    keyframes: int = 1,
) -> GarbageCollector:
    return GarbageCollector(
        store=store,
        epoch=epoch,
        resumable=lambda: resumable,
        retention=Retention(versions=versions, keyframes=keyframes),
    )


def hold(line: Any, replica: str, needs: VersionId) -> ReaderLease:
    lease = ReaderLease(line.store, replica)
    lease.record_live(line.manifests[needs].ref)
    return lease


def test_without_a_keyframe_the_whole_chain_stays(line: Any, store: MemoryStore) -> None:
    line.open()
    line.many(6)
    assert collector(store).collect() == []
    assert weights.is_reachable(store, V[5])


def test_what_lies_before_the_newest_keyframe_goes(line: Any, store: MemoryStore) -> None:
    line.open()
    line.many(6)
    line.skip(V[1], V[3])
    late = line.skip(V[3], V[5])
    line.keyframe(V[3])
    deleted = collector(store).collect()
    assert weights.accepted_chain(store) == V[3:6]
    assert deleted[:3] == [version.manifest_key for version in (V[2], V[1], V[0])]
    assert deleted[3] == versions.skip_key(V[1], V[3])
    assert weights.read_skip(store, V[3], V[5]) == late
    assert line.applied(None, weights.plan_path(store, None, V[5])) == line.models[V[5]]
    assert read_trash(store).tombstones == []
    assert collector(store).collect() == []


def test_the_last_versions_and_keyframes_stay(line: Any, store: MemoryStore) -> None:
    line.open()
    line.many(10)
    for number in (2, 5, 7, 9):
        line.keyframe(V[number])
    collector(store, versions=6, keyframes=2).collect()
    assert weights.accepted_chain(store) == V[4:10]
    assert {key.rpartition("/")[0] for key in store.objects if "/keyframes/" in key} == {
        f"weights/keyframes/{V[7].label}",
        f"weights/keyframes/{V[9].label}",
    }


def test_what_a_reader_holds_stays(line: Any, store: MemoryStore) -> None:
    line.open()
    line.many(10)
    line.keyframe(V[3])
    line.keyframe(V[8])
    lease = hold(line, "slow", V[5])
    collector(store).collect()
    assert weights.accepted_chain(store) == V[5:10]
    live = line.manifests[V[5]].ref
    assert line.applied(live, weights.plan_path(store, live, V[9])) == line.models[V[9]]
    lease.release()
    collector(store).collect()
    assert weights.accepted_chain(store) == V[8:10]


def test_a_keyframe_that_a_reader_begins_with_stays(line: Any, store: MemoryStore) -> None:
    line.open()
    line.many(10, pad=500)
    line.keyframe(V[3], pad=0)
    edges = ReaderLease(store, "new").plan_path(V[4])
    line.keyframe(V[8])
    collector(store).collect()
    assert line.applied(None, edges) == line.models[V[4]]


def test_a_retained_checkpoints_version_stays_reachable_without_weights(
    line: Any, store: MemoryStore
) -> None:
    line.open()
    line.many(10)
    for number in (2, 5, 8):
        line.keyframe(V[number])
    collector(store, resumable=[V[4]]).collect()
    assert weights.accepted_chain(store) == V[2:10]
    assert line.applied(None, weights.plan_path(store, None, V[4])) == line.models[V[4]]
    assert not [key for key in store.objects if V[5].label in key and "keyframes" in key]


def test_an_abandoned_version_that_a_checkpoint_names_stays_reachable(
    line: Any, store: MemoryStore
) -> None:
    line.open()
    line.many(6)
    line.open(V[2], "rollback")
    line.publish(VersionId(2, 6), (6, 6, 6), base=V[2])
    line.keyframe(VersionId(2, 6))
    collector(store, epoch=2, resumable=[V[4]]).collect()
    line.open(V[4], "rollback")
    assert weights.accepted_chain(store) == V[:5]
    assert line.applied(None, weights.plan_path(store, None, V[4])) == line.models[V[4]]


def test_dead_versions_go_with_everything_of_theirs(line: Any, store: MemoryStore) -> None:
    line.open()
    line.many(6)
    line.keyframe(V[5])
    line.skip(V[1], V[4])
    line.open(V[2], "rollback")
    line.publish(VersionId(2, 6), (6, 6, 6), base=V[2])
    collector(store, epoch=2).collect()
    assert weights.accepted_chain(store) == [*V[:3], VersionId(2, 6)]
    for number in (3, 4, 5):
        assert not [key for key in store.objects if f"{number:012d}" in key]


def test_old_payloads_that_no_manifest_can_name_any_more_are_swept(line: Any) -> None:
    now = [0.0]
    store = line.store = MemoryStore(clock=lambda: now[0])
    line.open()
    line.many(2)
    orphan = weights.publish_payload(store, V[7], 0, b"of a publisher that died")
    part = weights.publish_skip_part(store, V[5], V[7], 0, b"of a keeper that died")
    assert collector(store).collect() == []
    line.open(V[1], "takeover")
    now[0] = ORPHAN_S - 1
    line.publish(VersionId(2, 8), (8, 8, 8), base=V[1])
    assert collector(store, epoch=2).collect() == []
    now[0] = ORPHAN_S
    own = weights.publish_payload(store, VersionId(2, 11), 0, b"on its way")
    assert collector(store, epoch=2).collect() == [orphan, part]
    now[0] = 3 * ORPHAN_S
    line.publish(VersionId(2, 10), (8, 8, 9), base=VersionId(2, 8))
    assert collector(store, epoch=2).collect() == []
    line.publish(VersionId(2, 12), (8, 8, 7), base=VersionId(2, 10))
    assert collector(store, epoch=2).collect() == [own]  # a version that was given up


def test_a_keyframe_that_is_being_written_is_left_alone(line: Any) -> None:
    now = [0.0]
    store = line.store = MemoryStore(clock=lambda: now[0])
    line.open()
    line.many(4)
    line.keyframe(V[1])
    part = weights.publish_keyframe_part(store, V[3], 0, b"a long upload")
    now[0] = 10 * ORPHAN_S
    line.publish(V[4], (4, 4, 4), base=V[3])
    collector(store).collect()
    assert part in store.objects


def test_a_keyframe_that_lost_a_part_is_no_anchor_and_makes_room(
    line: Any, store: MemoryStore
) -> None:
    line.open()
    line.many(6)
    line.keyframe(V[2])
    broken = line.keyframe(V[4])
    del store.objects[broken.objects[0].key]
    collector(store).collect()
    assert weights.accepted_chain(store) == V[2:6]
    assert broken.key not in store.objects
    assert weights.is_reachable(store, V[5])
    assert line.keyframe(V[4]).target == line.manifests[V[4]].ref


def test_a_lease_that_rests_is_ignored_after_a_while(line: Any, store: MemoryStore) -> None:
    line.open()
    line.many(6)
    line.keyframe(V[4])
    hold(line, "dead", V[0])
    ours = collector(store)
    deleted = [bool(ours.collect()) for _ in range(MAX_IDLE_ROUNDS + 3)]
    assert deleted.index(True) > MAX_IDLE_ROUNDS
    assert weights.accepted_chain(store) == V[4:6]


def test_a_lease_that_moves_is_kept_for_ever(line: Any, store: MemoryStore) -> None:
    line.open()
    line.many(6)
    line.keyframe(V[4])
    ours = collector(store)
    ours.collect()
    line.keyframe(V[5])
    lease = hold(line, "idle", V[4])
    for _ in range(3 * MAX_IDLE_ROUNDS):
        lease.renew()
        ours.collect()
    assert weights.accepted_chain(store) == V[4:6]


def test_an_unreadable_lease_stops_deletion_until_it_rests(line: Any, store: MemoryStore) -> None:
    line.open()
    line.many(6)
    line.keyframe(V[4])
    store.put("weights/leases/who.json", b"torn")
    ours = collector(store)
    deleted = [bool(ours.collect()) for _ in range(MAX_IDLE_ROUNDS + 3)]
    assert not any(deleted[:MAX_IDLE_ROUNDS])
    assert any(deleted)


def test_a_fenced_collector_deletes_nothing(line: Any, store: MemoryStore) -> None:
    line.open()
    line.many(6)
    line.keyframe(V[4])
    line.open(V[5], "takeover")
    before = dict(store.objects)
    with pytest.raises(FencedError, match="epoch 2 is open, not 1"):
        collector(store).collect()
    assert store.objects == before


@dataclass
class Interrupted(MemoryStore):
    """Something happens right after the first tombstone; else the next listing fails."""

    happens: Callable[[], object] | None = None
    fails: bool = True

    @override
    def create(self, key: str, data: bytes) -> None:
        MemoryStore.create(self, key, data)
        happens, self.happens = self.happens, None
        if happens is None:
            return
        if key.startswith("weights/trash/"):
            happens()
        else:
            self.happens = happens

    @override
    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        if self.fails and prefix == "weights/leases/" and read_trash_keys(self):
            self.fails = False
            raise StoreError("503")
        return MemoryStore.list(self, prefix, after)


def read_trash_keys(store: MemoryStore) -> list[str]:
    return [key for key in store.objects if key.startswith("weights/trash/")]


def test_a_reader_that_comes_after_the_tombstone_keeps_what_it_needs(line: Any) -> None:
    store = line.store = Interrupted()
    line.open()
    line.many(6)
    line.keyframe(V[4])
    store.fails, store.happens = False, lambda: hold(line, "late", V[1])
    assert collector(store).collect() == []
    assert weights.accepted_chain(store) == V[:6]
    assert read_trash(store).tombstones == []


def test_a_publisher_that_takes_over_after_the_tombstone_begins_anew_or_keeps_its_parent(
    line: Any,
) -> None:
    store = line.store = Interrupted()
    line.open()
    line.many(6)
    line.keyframe(V[4])
    store.fails, store.happens = False, lambda: line.open(V[2], "takeover")
    before = set(store.objects)
    with pytest.raises(FencedError):
        collector(store).collect()
    assert before <= set(store.objects)
    assert read_trash(store).tombstones == []
    latest = weights.read_epoch(store, 3)
    assert latest.parent is None
    with pytest.raises(ValueError, match="neither of epoch 3"):
        line.publish(VersionId(3, 6), (6, 6, 6), base=V[2])
    line.publish(VersionId(3, 6), (6, 6, 6))


def test_a_deletion_that_was_interrupted_is_finished(line: Any) -> None:
    store = line.store = Interrupted()
    line.open()
    line.many(6)
    line.keyframe(V[4])
    ours = collector(store)
    with pytest.raises(StoreError):
        ours.collect()
    [tombstone] = read_trash(store).tombstones
    store.delete(tombstone.keys[:3])
    assert set(collector(store).collect()) == set(tombstone.keys)
    assert weights.accepted_chain(store) == V[4:6]
    assert read_trash(store).tombstones == []


@pytest.mark.parametrize("is_ours", [True, False])
def test_only_an_own_unused_tombstone_is_taken_back(line: Any, *, is_ours: bool) -> None:
    store = line.store = Interrupted()
    line.open()
    line.many(6)
    line.keyframe(V[4])
    first = collector(store)
    with pytest.raises(StoreError):
        first.collect()
    hold(line, "late", V[0])
    assert (first if is_ours else collector(store)).collect() == []
    assert len(read_trash(store).tombstones) == (0 if is_ours else 1)
    assert weights.accepted_chain(store) == V[:6]


def test_a_damaged_tombstone_stops_neither_readers_nor_a_new_line(
    line: Any, store: MemoryStore
) -> None:
    line.open()
    line.many(6)
    line.keyframe(V[4])
    store.put(f"weights/trash/{'0' * 32}.json", b"?")
    assert ReaderLease(store, "replica-0").plan_path(V[5])
    assert line.open(V[5], "takeover") == 3
    assert weights.read_epoch(store, 3).parent is None


def test_floors_below_one_are_refused() -> None:
    for floors in ({"versions": 0}, {"keyframes": 0}):
        with pytest.raises(ValueError, match="always kept"):
            Retention(**floors)
