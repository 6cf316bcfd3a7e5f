"""Preempted environments of a host: paused between turns, without a slot, then resumed."""

import asyncio
from collections.abc import Callable

import grpc
import pytest
from tests.support.environments.host_calls import FIX, SPOIL, Order, call, content, opened, said

from etude.common.errors import EtudeError
from etude.envserver.drivers.base import DriverCapabilities
from etude.envserver.host.host import Host
from etude.envserver.host.leases.preemption import PreemptedError
from etude.v1 import environments_pb2

MakeNode = Callable[..., Host]


async def test_a_preempted_environment_takes_no_slot_and_goes_on_as_it_was(
    make_node: MakeNode, order: Order
) -> None:
    node = make_node(slots=1)
    environment = await opened(node, order)
    await said(environment, call("1", "search_replace", **FIX))

    assert await node.preemptions.preempt(["a"], 1) == ["a"]
    await opened(node, order, "b")
    assert await node.preemptions.resume(["a"]) == []
    await node.close(["b"])
    assert await node.preemptions.resume(["a"]) == ["a"]

    assert await said(environment, call("1", "search_replace", **FIX)) == ["ok"]
    assert b"a + b" in await content(environment)


async def test_heartbeats_say_which_leases_wait(make_node: MakeNode, order: Order) -> None:
    node = make_node()
    await opened(node, order, "a")
    await opened(node, order, "b")
    await node.preemptions.preempt(["b", "a"], 1)
    flags = {held.lease.lease_id: held.preempted for held in node.held_leases()}
    assert flags == {"a": False, "b": True}


async def test_a_call_of_a_preempted_lease_is_refused_as_a_fault_of_the_platform(
    make_node: MakeNode, order: Order
) -> None:
    node = make_node()
    environment = await opened(node, order)
    await node.preemptions.preempt(["a"], 1)

    with pytest.raises(PreemptedError) as refused:
        await said(environment, call("1", "search_replace", **FIX))

    assert refused.value.code is grpc.StatusCode.UNAVAILABLE
    for refuse in (node.states.pause(environment), node.resume("a", "control-a", ttl_s=9)):
        with pytest.raises(PreemptedError):
            await refuse


async def test_an_environment_in_a_turn_is_left_alone(make_node: MakeNode, order: Order) -> None:
    node = make_node()
    first, _ = await opened(node, order, "a"), await opened(node, order, "b")
    async with first.turn:
        assert await node.preemptions.preempt(["a", "b"], 1) == ["b"]


async def test_an_environment_with_running_programs_that_a_pause_would_end_is_left_alone(
    make_node: MakeNode, order: Order, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = make_node()
    environment = await opened(node, order)
    await said(environment, call("1", "search_replace", **FIX))
    monkeypatch.setattr(type(environment.sandbox.workspace.jobs), "may_run", True)
    assert await node.preemptions.preempt(["a"], 1) == []
    assert not environment.is_paused


async def test_a_driver_that_saves_nothing_is_never_preempted(
    make_node: MakeNode, order: Order
) -> None:
    node = make_node()
    await opened(node, order)
    node.driver.caps = DriverCapabilities(files=False, memory=False, freeze=True)
    assert await node.preemptions.preempt(["a"], 1) == []


async def test_a_lease_that_its_holder_had_paused_stays_paused(
    make_node: MakeNode, order: Order
) -> None:
    node = make_node()
    environment = await opened(node, order)
    await said(environment, call("1", "search_replace", **FIX))
    await node.states.pause(environment)

    await node.preemptions.preempt(["a"], 1)
    await node.preemptions.resume(["a"])

    assert environment.is_paused
    await node.resume("a", "control-a", ttl_s=60)
    await said(environment, call("2", "search_replace", **SPOIL))


async def test_a_successor_finds_who_waits(make_node: MakeNode, order: Order) -> None:
    node = make_node(slots=1)
    environment = await opened(node, order)
    await said(environment, call("1", "search_replace", **FIX))
    await node.preemptions.preempt(["a"], 1)

    successor = make_node(slots=1)
    await successor.take_over()
    await opened(successor, order, "b")

    assert await successor.preemptions.resume(["a"]) == []
    await successor.close(["b"])
    assert await successor.preemptions.resume(["a"]) == ["a"]
    assert b"a + b" in await content(successor.find("a"))


async def test_a_preempted_lease_that_ends_leaves_nothing(
    make_node: MakeNode, order: Order
) -> None:
    node = make_node()
    await opened(node, order)
    await node.preemptions.preempt(["a"], 1)
    await node.close(["a"])
    assert list(node.driver.leases.iterdir()) == []
    assert await node.preemptions.resume(["a"]) == []


async def test_a_preempted_lease_that_expires_is_kept_for_its_holder(
    make_node: MakeNode, order: Order
) -> None:
    node = make_node()
    asked = order("a", ttl_s=0.2)
    asked.on_expiry = environments_pb2.ON_EXPIRY_PAUSE
    await node.open(asked)
    await node.preemptions.preempt(["a"], 1)
    environment = node.find("a")
    await node.expire(now_s=environment.deadline_s)
    await node.expired_leases.settle()

    await node.resume("a", "control-a", ttl_s=60)

    assert not node.find("a").record.held.preempted
    await said(node.find("a"), call("1", "search_replace", **FIX))


async def test_two_orders_to_resume_give_one_slot_once(make_node: MakeNode, order: Order) -> None:
    node = make_node(slots=1)
    await opened(node, order, "a")
    await node.preemptions.preempt(["a"], 1)
    await opened(node, order, "b")
    await node.preemptions.preempt(["b"], 1)

    done = await asyncio.gather(node.preemptions.resume(["a"]), node.preemptions.resume(["b"]))

    assert sorted(map(len, done)) == [0, 1]


async def test_a_lease_whose_driver_fails_to_pause_goes_on(
    make_node: MakeNode, order: Order, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = make_node()
    environment = await opened(node, order)
    await said(environment, call("1", "search_replace", **FIX))

    async def fail() -> None:
        raise OSError("the disk is full")

    with monkeypatch.context() as broken:
        broken.setattr(environment.sandbox, "pause", fail)
        assert await node.preemptions.preempt(["a"], 1) == []

    assert b"a + b" in await content(environment)
    with pytest.raises(EtudeError):
        await node.resume("other", "control", ttl_s=9)
