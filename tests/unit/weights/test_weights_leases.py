"""What a reader holds, so that nothing is deleted under it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from typing_extensions import override

from etude.common import weights
from etude.common.blobs import MemoryStore
from etude.common.errors import StoreError
from etude.common.weights import Collector, Lease, Retention, VersionId
from etude.common.weights.leases import seen_leases

V = [VersionId(1, number) for number in range(12)]


def lease(replica: str = "replica-0", **fields: Any) -> Lease:
    return Lease(**({"replica": replica, "live": None, "needs": None, "serial": 0} | fields))


def greedy(store: MemoryStore, epoch: int = 1) -> Collector:
    return Collector(
        store=store,
        epoch=epoch,
        resumable=lambda: (),
        retention=Retention(versions=1, keyframes=1),
    )


def test_a_plan_is_held_before_it_is_relied_on(line: Any, store: MemoryStore) -> None:
    line.open()
    line.many(8, pad=500)
    line.keyframe(V[4], pad=10)
    found = weights.protected_plan(store, lease(), V[7])
    assert [edge.kind for edge in found.edges] == ["keyframe", "delta", "delta", "delta"]
    assert found.lease.needs == line.manifests[V[4]].ref
    [seen] = seen_leases(store)
    assert (seen.replica, seen.needs, seen.is_readable) == ("replica-0", V[4], True)
    line.keyframe(V[7], pad=10)
    greedy(store).round()
    assert line.applied(None, found.edges) == line.models[V[7]]


def test_a_replica_that_follows_writes_nothing_to_plan(line: Any, store: MemoryStore) -> None:
    line.open()
    line.many(8)
    serving = lease(serial=3).serving(line.manifests[V[6]].ref)
    weights.write_lease(store, serving)
    before = dict(store.objects)
    found = weights.protected_plan(store, serving, V[7])
    assert [edge.kind for edge in found.edges] == ["delta"]
    assert found.lease == serving
    assert store.objects == before


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
        assert greedy(store).round()

    store.happens = collect
    found = weights.protected_plan(store, lease(live=live), V[7])
    assert [edge.kind for edge in found.edges] == ["keyframe", "delta"]
    assert found.lease.needs == line.manifests[V[6]].ref
    assert line.applied(live, found.edges) == line.models[V[7]]


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
        weights.protected_plan(store, lease(), V[11])


def test_a_lease_is_its_owners_to_renew_and_to_drop(line: Any, store: MemoryStore) -> None:
    line.open()
    line.many(2)
    first = lease().serving(line.manifests[V[0]].ref)
    second = first.serving(line.manifests[V[1]].ref)
    assert (first.serial, second.serial) == (1, 2)
    tokens = []
    for each in (first, first, second):
        weights.write_lease(store, each)
        [seen] = seen_leases(store)
        tokens.append(seen.token)
    assert tokens[0] == tokens[1] != tokens[2]
    weights.drop_lease(store, "replica-0")
    assert seen_leases(store) == []
    weights.drop_lease(store, "replica-0")


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff" * 9, b" " * ((16 << 20) + 1)])
def test_a_lease_that_nobody_can_read_is_seen_as_such(store: MemoryStore, content: bytes) -> None:
    store.put("weights/leases/replica-0.json", content)
    [seen] = seen_leases(store)
    assert not seen.is_readable
    assert seen.needs is None


def test_a_lease_under_anothers_name_is_not_believed(store: MemoryStore) -> None:
    weights.write_lease(store, lease("a"))
    store.put("weights/leases/b.json", store.get("weights/leases/a.json"))
    store.put("weights/leases/sub/c.json", b"")
    assert [(each.replica, each.is_readable) for each in seen_leases(store)] == [
        ("a", True),
        ("b", False),
    ]


@pytest.mark.parametrize("name", ["", "../a", "a/b", ".a", "a" * 129])
def test_a_replicas_name_stays_inside_the_leases(name: str) -> None:
    with pytest.raises(ValueError, match="replica"):
        lease(name)
