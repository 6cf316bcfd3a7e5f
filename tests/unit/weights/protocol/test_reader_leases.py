"""What a reader holds, so that nothing is deleted under it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from typing_extensions import override

from etude.common.blobs import MemoryStore
from etude.common.errors import StoreError
from etude.common.weights import GarbageCollector, ReaderLease, Retention, VersionId
from etude.common.weights.protocol.reader_leases import observe_leases

V = [VersionId(1, number) for number in range(12)]


def greedy(store: MemoryStore, epoch: int = 1) -> GarbageCollector:
    return GarbageCollector(
        store=store,
        epoch=epoch,
        resumable=lambda: (),
        retention=Retention(versions=1, keyframes=1),
    )


def test_a_plan_is_held_before_it_is_relied_on(line: Any, store: MemoryStore) -> None:
    line.open()
    line.many(8, pad=500)
    line.keyframe(V[4], pad=10)
    edges = ReaderLease(store, "replica-0").plan_path(V[7])
    assert [edge.kind for edge in edges] == ["keyframe", "delta", "delta", "delta"]
    [seen] = observe_leases(store)
    assert (seen.replica, seen.needs, seen.is_readable) == ("replica-0", V[4], True)
    line.keyframe(V[7], pad=10)
    greedy(store).collect()
    assert line.applied(None, edges) == line.models[V[7]]


def test_a_replica_that_follows_writes_nothing_to_plan(line: Any, store: MemoryStore) -> None:
    line.open()
    line.many(8)
    lease = ReaderLease(store, "replica-0")
    lease.record_live(line.manifests[V[6]].ref)
    before = dict(store.objects)
    assert [edge.kind for edge in lease.plan_path(V[7])] == ["delta"]
    assert store.objects == before


def test_a_lease_that_may_not_have_arrived_is_written_again(line: Any) -> None:
    @dataclass
    class Failing(MemoryStore):
        """Fails puts of leases, before they take effect."""

        fails: bool = True

        @override
        def put(self, key: str, data: Any) -> None:
            if self.fails and key.startswith("weights/leases/"):
                raise StoreError(f"{key}: 503")
            MemoryStore.put(self, key, data)

    store = line.store = Failing()
    line.open()
    line.many(8)
    lease = ReaderLease(store, "replica-0")
    with pytest.raises(StoreError, match="503"):
        lease.record_live(line.manifests[V[6]].ref)
    assert lease.live == line.manifests[V[6]].ref
    store.fails = False
    assert observe_leases(store) == []
    assert lease.plan_path(V[7])
    assert [seen.needs for seen in observe_leases(store)] == [V[6]]


@dataclass
class Collected(MemoryStore):
    """In which something happens right before a lease arrives."""

    happens: Callable[[], object] | None = None

    @override
    def put(self, key: str, data: Any) -> None:
        happens, self.happens = self.happens, None
        if happens is not None and key.startswith("weights/leases/"):
            happens()
        else:
            self.happens = happens
        MemoryStore.put(self, key, data)


def test_a_plan_that_a_collector_took_apart_meanwhile_is_made_again(line: Any) -> None:
    store = line.store = Collected()
    line.open()
    line.many(8)
    live = line.manifests[V[2]].ref

    def collect() -> None:
        line.keyframe(V[6], pad=10)
        assert greedy(store).collect()

    store.happens = collect
    edges = ReaderLease(store, "replica-0", live).plan_path(V[7])
    assert [edge.kind for edge in edges] == ["keyframe", "delta"]
    assert [seen.needs for seen in observe_leases(store)] == [V[6]]
    assert line.applied(live, edges) == line.models[V[7]]


def test_a_reader_that_loses_every_plan_says_so(line: Any) -> None:
    @dataclass
    class Relentless(MemoryStore):
        """A keyframe earlier by one before each lease."""

        next_one: int = 8

        @override
        def put(self, key: str, data: Any) -> None:
            MemoryStore.put(self, key, data)
            if key.startswith("weights/leases/"):
                self.next_one -= 1
                line.skip(V[self.next_one], V[11])
                line.keyframe(V[self.next_one], pad=self.next_one)

    store = line.store = Relentless()
    line.open()
    line.many(12)
    line.skip(V[8], V[11])
    line.keyframe(V[8], pad=8)
    with pytest.raises(StoreError, match=r"1\.11 is being deleted"):
        ReaderLease(store, "replica-0").plan_path(V[11])


def test_a_lease_is_its_owners_to_renew_and_to_drop(line: Any, store: MemoryStore) -> None:
    line.open()
    line.many(2)
    lease = ReaderLease(store, "replica-0")
    tokens = []
    for act in (lambda: lease.record_live(line.manifests[V[1]].ref), lease.renew, lease.renew):
        act()
        [seen] = observe_leases(store)
        assert seen.needs == V[1]
        tokens.append(seen.token)
    assert len(set(tokens)) == 3
    lease.release()
    assert observe_leases(store) == []
    lease.release()


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff" * 9, b" " * ((16 << 20) + 1)])
def test_a_lease_that_nobody_can_read_is_seen_as_such(store: MemoryStore, content: bytes) -> None:
    store.put("weights/leases/replica-0.json", content)
    [seen] = observe_leases(store)
    assert not seen.is_readable
    assert seen.needs is None


def test_a_lease_under_anothers_name_is_not_believed(store: MemoryStore) -> None:
    ReaderLease(store, "a").renew()
    store.put("weights/leases/b.json", store.get("weights/leases/a.json"))
    store.put("weights/leases/sub/c.json", b"")
    assert [(each.replica, each.is_readable) for each in observe_leases(store)] == [
        ("a", True),
        ("b", False),
    ]


@pytest.mark.parametrize("name", ["", "../a", "a/b", ".a", "a" * 129])
def test_a_replicas_name_stays_inside_the_leases(store: MemoryStore, name: str) -> None:
    with pytest.raises(ValueError, match="replica"):
        ReaderLease(store, name).renew()
