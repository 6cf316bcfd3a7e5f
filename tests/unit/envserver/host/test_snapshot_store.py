"""Snapshots in a store: taken up by another node, and by nobody who may not."""

import json
from collections.abc import Callable

import pytest
from tests.support.environments.host_calls import FIX, SPOIL, Order, call, content, opened, said
from typing_extensions import Buffer, override

from etude.common.blobs import MemoryStore
from etude.common.errors import CorruptError, EtudeError, StoreError, UnknownIdError
from etude.envserver.drivers.base import CapMissingError
from etude.envserver.host.environment import LeasedEnvironment
from etude.envserver.host.host import Host
from etude.envserver.host.snapshots.environment_state import origin_of
from etude.envserver.host.snapshots.local_snapshots import NoRoomError, SnapshotQuota
from etude.envserver.host.snapshots.snapshot_record import LocalSnapshot
from etude.envserver.host.snapshots.snapshot_store import (
    MANIFEST,
    SharedSnapshot,
    SharedSnapshotRef,
    SnapshotStore,
    store_prefix,
)

MakeNode = Callable[..., Host]


class Pair:
    """A lease with a snapshot on a node that will be lost, and a lease on one that goes on."""

    def __init__(self, first: Host, second: Host) -> None:
        self.store = MemoryStore()
        self.first, self.second = first, second
        self.here, self.there = (SnapshotStore(self.store, node.driver) for node in (first, second))

    async def begin(self, order: Order) -> LeasedEnvironment:
        environment = await opened(self.first, order)
        await said(environment, call("1", "search_replace", **FIX))
        self.snapshot = await self.first.states.snapshot(environment, "good", with_memory=False)
        await said(environment, call("2", "search_replace", **SPOIL))
        self.other = await opened(self.second, order, "b")
        return environment

    async def share(self) -> SharedSnapshot:
        return await self.here.share(self.first.states.snapshots, self.snapshot)

    async def fetch(self, digest: str, name: str = "good") -> LocalSnapshot:
        wanted, origin = SharedSnapshotRef(name, digest), origin_of(self.other)
        return await self.there.fetch(self.second.states.snapshots, origin, wanted, "mine")


@pytest.fixture
def pair(make_node: MakeNode) -> Pair:
    return Pair(make_node(), make_node())


async def test_another_host_takes_up_files_and_results(pair: Pair, order: Order) -> None:
    await pair.begin(order)
    shared = await pair.share()
    assert shared.num_bytes > 0

    await pair.fetch(shared.digest)
    await pair.second.states.rollback(pair.other, "mine")

    assert b"a + b" in await content(pair.other)
    # The call has its result, and is not run again: it would find nothing to replace.
    assert await said(pair.other, call("1", "search_replace", **FIX)) == ["ok"]
    assert await said(pair.other, call("2", "search_replace", **SPOIL)) == ["ok"]


async def test_sharing_again_changes_nothing(pair: Pair, order: Order) -> None:
    await pair.begin(order)
    first = await pair.share()
    objects = dict(pair.store.objects)
    assert await pair.share() == first
    assert pair.store.objects == objects


class Flaky(MemoryStore):
    """Fails after so many objects."""

    left: int

    @override
    def put(self, key: str, data: Buffer) -> None:
        if not self.left:
            raise StoreError("the store is away")
        self.left -= 1
        super().put(key, data)


async def test_a_store_that_goes_away_leaves_nothing_to_take_up_and_is_asked_again(
    pair: Pair, order: Order
) -> None:
    await pair.begin(order)
    pair.store = pair.here.store = pair.there.store = store = Flaky()
    store.left = 1
    with pytest.raises(StoreError):
        await pair.share()
    with pytest.raises(UnknownIdError):
        await pair.fetch("0" * 64)

    store.left = 10
    await pair.fetch((await pair.share()).digest)


async def test_a_snapshot_of_another_run_is_not_found(pair: Pair, order: Order) -> None:
    await pair.begin(order)
    shared = await pair.share()
    pair.other.record.held.run_id = "foreign"
    with pytest.raises(UnknownIdError):
        await pair.fetch(shared.digest)


async def test_a_manifest_of_another_run_in_the_right_place_is_refused(
    pair: Pair, order: Order
) -> None:
    await pair.begin(order)
    shared = await pair.share()
    mine = store_prefix(pair.snapshot.origin.run_id, "good")
    for key in list(pair.store.objects):
        moved = key.replace(mine, store_prefix("foreign", "good"))
        pair.store.put(moved, pair.store.objects[key])
    pair.other.record.held.run_id = "foreign"
    with pytest.raises(CorruptError, match="another run"):
        await pair.fetch(shared.digest)


async def test_nothing_is_taken_up_without_its_digest(pair: Pair, order: Order) -> None:
    await pair.begin(order)
    await pair.share()
    for digest in ("", "0" * 64):
        with pytest.raises(CorruptError, match="another digest than the one given"):
            await pair.fetch(digest)
    with pytest.raises(UnknownIdError):
        await pair.fetch("0" * 64, "better")


async def test_every_damaged_object_is_refused_and_the_lease_goes_on_as_it_was(
    pair: Pair, order: Order
) -> None:
    await pair.begin(order)
    shared = await pair.share()
    whole = dict(pair.store.objects)
    assert len(whole) >= 2
    for key, data in whole.items():
        for damaged in (data[:-1], data[:-1] + bytes([data[-1] ^ 1]), None):
            pair.store.objects = {**whole, key: damaged or b""}
            if damaged is None:
                del pair.store.objects[key]
            with pytest.raises(EtudeError):
                await pair.fetch(shared.digest)
    assert pair.second.states.snapshots.held_snapshots() == []
    assert await said(pair.other, call("1", "search_replace", **FIX)) == ["ok"]

    pair.store.objects = whole
    await pair.fetch(shared.digest)


@pytest.mark.parametrize("part", ["template", "source_key"])
async def test_a_snapshot_of_something_else_is_refused(pair: Pair, order: Order, part: str) -> None:
    await pair.begin(order)
    shared = await pair.share()
    fields = origin_of(pair.other)._replace(**{part: "other"})
    wanted = SharedSnapshotRef("good", shared.digest)
    with pytest.raises(CorruptError, match="is of another"):
        await pair.there.fetch(pair.second.states.snapshots, fields, wanted, "mine")


async def test_a_snapshot_that_does_not_fit_leaves_nothing_behind(pair: Pair, order: Order) -> None:
    await pair.begin(order)
    shared = await pair.share()
    pair.second.states.snapshots.quota = SnapshotQuota(max_bytes=10)
    with pytest.raises(NoRoomError):
        await pair.fetch(shared.digest)
    # Both nodes of this test have one folder.
    assert list(pair.second.states.snapshots.folder.iterdir()) == [pair.snapshot.folder]


async def test_a_driver_whose_snapshots_hold_memory_shares_none(pair: Pair, order: Order) -> None:
    await pair.begin(order)
    object.__setattr__(pair.snapshot, "has_memory", True)
    with pytest.raises(CapMissingError, match="portable"):
        await pair.share()
    assert pair.store.objects == {}


async def test_what_is_too_old_is_swept_by_the_stores_own_clock(pair: Pair, order: Order) -> None:
    clock = [100.0]
    pair.store.clock = lambda: clock[0]
    await pair.begin(order)
    await pair.share()
    assert pair.here.sweep(50) == 0
    foreign = (
        "weights/manifest",
        f"runs/{store_prefix('a', 'b')}/manifest",
        f"{store_prefix('a', 'b')}/note",
    )
    for key in foreign:
        pair.store.put(key, b"somebody else's")
    clock[0] = 151.0
    new = f"{store_prefix('new', 'one')}/{MANIFEST}"
    pair.store.put(new, b"x")
    assert pair.here.sweep(51) == 0
    assert pair.here.sweep(50) == 2
    assert set(pair.store.objects) == {new, *foreign}


async def test_a_snapshot_that_is_removed_is_found_no_more(pair: Pair, order: Order) -> None:
    await pair.begin(order)
    shared = await pair.share()
    await pair.here.remove(pair.snapshot.origin.run_id, "good")
    assert pair.store.objects == {}
    with pytest.raises(UnknownIdError):
        await pair.fetch(shared.digest)


async def test_a_manifest_says_nothing_secret(pair: Pair, order: Order) -> None:
    environment = await pair.begin(order)
    await pair.share()
    (key,) = (key for key in pair.store.objects if key.endswith(MANIFEST))
    said_there = json.loads(pair.store.objects[key])
    lease = environment.record.held.lease
    assert lease.control_token not in json.dumps(said_there)
    assert not any(lease.control_token.encode() in data for data in pair.store.objects.values())
