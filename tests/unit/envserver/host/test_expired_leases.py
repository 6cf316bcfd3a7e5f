"""How long a node keeps snapshots and paused environments, and what they may take."""

import time
from collections.abc import Callable

import pytest
from tests.support.environments.host_calls import FIX, Order, call, content, opened, said

from etude.common.errors import (
    ForbiddenError,
    UnknownIdError,
    WrongStateError,
)
from etude.envserver.drivers.base import CapMissingError, DriverCapabilities
from etude.envserver.drivers.in_memory import MemoryDriver
from etude.envserver.host.environment import LeasedEnvironment
from etude.envserver.host.host import Host
from etude.envserver.host.snapshots.local_snapshots import NoRoomError, SnapshotQuota
from etude.v1 import environments_pb2

MakeNode = Callable[..., Host]


async def test_nothing_can_be_done_with_a_paused_environment_until_it_is_resumed(
    make_node: MakeNode, order: Order
) -> None:
    node = make_node()
    environment = await opened(node, order)
    fix = call("1", "search_replace", **FIX)
    await said(environment, fix)
    for _ in range(2):
        await node.states.pause(environment)

    for work in (
        environment.run_turn([call("2", "list_dir", path=".")]),
        environment.diff(),
        node.states.snapshot(environment, "s", with_memory=False),
        node.states.rollback(environment, "s"),
    ):
        with pytest.raises(WrongStateError, match="is paused: resume it first"):
            await work
    for _ in range(2):
        await node.resume("a", "control-a", ttl_s=60)
    assert b"a + b" in await content(environment)


@pytest.mark.parametrize("cap", ["files", "memory"])
async def test_what_the_driver_cannot_do_is_refused_by_the_name_of_the_cap(
    make_node: MakeNode, order: Order, cap: str
) -> None:
    node = make_node()
    environment = await opened(node, order)
    assert isinstance(node.driver, MemoryDriver)
    node.driver.caps = DriverCapabilities(files=cap != "files", memory=False, freeze=True)

    with pytest.raises(CapMissingError, match=f"driver memory has no cap '{cap}'"):
        await node.states.snapshot(environment, "s", with_memory=True)
    if cap == "files":
        with pytest.raises(CapMissingError, match="'files'"):
            await node.states.pause(environment)
        asked = order("b")
        asked.on_expiry = environments_pb2.ON_EXPIRY_PAUSE
        (outcome,) = await node.open(asked)
        assert outcome.failure.reason == "CapMissing"


async def test_a_lease_says_what_can_be_done_with_it(make_node: MakeNode, order: Order) -> None:
    (outcome,) = await make_node().open(order("a"))

    assert outcome.lease.start == environments_pb2.START_COPY
    told = environments_pb2.Caps(files=True, memory=False, freeze=True, portable=True)
    assert outcome.lease.caps == told


async def test_a_lease_whose_snapshots_hold_memory_says_that_they_stay_on_their_host(
    make_node: MakeNode, order: Order
) -> None:
    node = make_node()
    assert isinstance(node.driver, MemoryDriver)
    node.driver.caps = DriverCapabilities(files=True, memory=True, freeze=True, egress=True)

    (outcome,) = await node.open(order("a"))

    caps = outcome.lease.caps
    assert (caps.memory, caps.portable, caps.egress) == (True, False, True)


async def fill(node: Host, environment: LeasedEnvironment) -> None:
    for name in ("s", "t", "u"):
        await node.states.snapshot(environment, name, with_memory=False)


@pytest.mark.parametrize(
    ("quota", "words"),
    [
        (SnapshotQuota(max_snapshots=1), "has 1 snapshots"),
        (SnapshotQuota(max_on_node=2), "holds 2 snapshots"),
        (SnapshotQuota(max_bytes=150), "does not fit"),
        (SnapshotQuota(max_entries=3), "does not fit"),
        (SnapshotQuota(reserve_bytes=1 << 60), "the disk keeps"),
    ],
)
async def test_what_a_run_may_not_take_is_refused_and_leaves_nothing(
    make_node: MakeNode, order: Order, quota: SnapshotQuota, words: str
) -> None:
    node = make_node()
    node.states.snapshots.quota = quota
    environment = await opened(node, order)

    with pytest.raises(NoRoomError, match=words):
        await fill(node, environment)

    kept = node.states.snapshots.held_snapshots()
    assert len(list(node.states.snapshots.folder.iterdir())) == len(kept)
    node.states.snapshots.quota = SnapshotQuota()
    await node.states.snapshot(environment, "fits", with_memory=False)


async def test_snapshots_end_with_their_time(make_node: MakeNode, order: Order) -> None:
    node = make_node()
    environment = await opened(node, order)
    node.states.snapshots.quota = SnapshotQuota(ttl_s=0)
    await node.states.snapshot(environment, "s", with_memory=False)

    await node.expire(now_s=time.monotonic())

    assert node.states.snapshots.held_snapshots() == []
    assert list(node.states.snapshots.folder.iterdir()) == []


async def test_snapshots_outlive_their_runs_last_lease_by_their_grace(
    make_node: MakeNode, order: Order
) -> None:
    node = make_node()
    environment = await opened(node, order)
    await node.states.snapshot(environment, "s", with_memory=False)
    now_s = time.monotonic()
    grace_s = node.states.snapshots.quota.grace_s
    await node.expire(now_s=now_s)
    await node.close(["a"])

    await node.expire(now_s=now_s + grace_s - 1)
    assert len(node.states.snapshots.held_snapshots()) == 1
    await node.expire(now_s=now_s + grace_s + 1)
    assert node.states.snapshots.held_snapshots() == []


async def test_a_lease_that_shall_be_kept_takes_no_slot_and_goes_on_when_resumed(
    make_node: MakeNode, order: Order
) -> None:
    node = make_node(slots=1)
    asked = order("a", ttl_s=0)
    asked.on_expiry = environments_pb2.ON_EXPIRY_PAUSE
    await node.open(asked)
    await said(node.find("a"), call("1", "search_replace", **FIX))

    assert await node.expire(now_s=time.monotonic() + 1) == ["a"]
    await node.expired_leases.settle()

    assert node.held_leases() == []
    with pytest.raises(WrongStateError, match="resume it first"):
        node.find("a")
    await opened(node, order, "b")
    with pytest.raises(Exception, match="slots are taken"):
        await node.resume("a", "control-a", ttl_s=60)
    await node.close(["b"])
    expires = await node.resume("a", "control-a", ttl_s=60)
    assert [held.lease.expires_unix_ms for held in node.held_leases()] == [expires]
    assert b"a + b" in await content(node.find("a"))


async def test_a_broker_that_ends_an_expired_lease_does_not_end_one_that_shall_be_kept(
    make_node: MakeNode, order: Order
) -> None:
    node = make_node()
    for name, ttl_s in (("a", 0), ("b", 60)):
        asked = order(name, ttl_s=ttl_s)
        asked.on_expiry = environments_pb2.ON_EXPIRY_PAUSE
        await node.open(asked)

    await node.close(["a", "b"])
    await node.expired_leases.settle()

    assert "a" in node.expired_leases
    with pytest.raises(UnknownIdError):
        node.find("b")


async def test_what_is_kept_ends_at_last(make_node: MakeNode, order: Order) -> None:
    node = make_node()
    asked = order("a", ttl_s=0)
    asked.on_expiry = environments_pb2.ON_EXPIRY_PAUSE
    await node.open(asked)
    now_s = time.monotonic()
    await node.expire(now_s=now_s + 1)
    await node.expired_leases.settle()

    await node.expire(now_s=now_s + 2000)

    with pytest.raises(UnknownIdError):
        await node.resume("a", "control-a", ttl_s=60)
    assert list(node.driver.leases.iterdir()) == []


async def test_a_successor_keeps_what_was_kept(make_node: MakeNode, order: Order) -> None:
    dead = make_node()
    asked = order("a", ttl_s=0)
    asked.on_expiry = environments_pb2.ON_EXPIRY_PAUSE
    await dead.open(asked)
    await said(dead.find("a"), call("1", "search_replace", **FIX))
    await dead.expire(now_s=time.monotonic() + 1)
    await dead.expired_leases.settle()

    node = make_node()
    await node.take_over()

    assert node.held_leases() == []
    await node.expire(now_s=time.monotonic() + 100)
    await node.resume("a", "control-a", ttl_s=60)
    assert b"a + b" in await content(node.find("a"))


async def test_only_who_controls_a_lease_that_is_kept_can_resume_it(
    make_node: MakeNode, order: Order
) -> None:
    node = make_node()
    asked = order("a", ttl_s=0)
    asked.on_expiry = environments_pb2.ON_EXPIRY_PAUSE
    await node.open(asked)
    await node.expire(now_s=time.monotonic() + 1)

    with pytest.raises(ForbiddenError):
        await node.resume("a", "agent-a", ttl_s=60)
    assert node.held_leases() == []
    await node.expired_leases.settle()


async def test_an_order_about_the_end_that_was_does_not_end_what_was_resumed(
    make_node: MakeNode, order: Order
) -> None:
    node = make_node()
    asked = order("a", ttl_s=0)
    asked.on_expiry = environments_pb2.ON_EXPIRY_PAUSE
    await node.open(asked)
    await node.expire(now_s=time.monotonic() + 1)
    await node.resume("a", "control-a", ttl_s=60)

    await node.close(["a"])
    assert len(node.held_leases()) == 1
    await node.expire(now_s=time.monotonic() + 10)
    await node.close(["a"])
    assert node.held_leases() == []
