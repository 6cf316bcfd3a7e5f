"""Preemption: a class below its floor gets slots of rollouts, which wait and go on later."""

import asyncio
import functools
import time
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.environments.brokers import (
    Response,
    expect_nobody,
    launched,
    request,
    some,
    start_with_floor,
)

from etude.envserver.broker.broker import Broker
from etude.envserver.broker.classes.preemption import (
    PREEMPTED_CLASSES,
    choose_lenders,
    slots_owed,
)
from etude.envserver.broker.classes.preemptor import MOST_RETRY_S, RESCAN_S, SHIFT_S
from etude.envserver.broker.classes.shares import ClassRule, ClassShares
from etude.envserver.broker.host_client import MemoryHostClient
from etude.envserver.broker.pool_report import make_report
from etude.v1 import environments_pb2

SERVING = environments_pb2.LEASE_CLASS_SERVING
TRAINING = environments_pb2.LEASE_CLASS_TRAINING
CLASSES = (1, 2, 3, 4)
RULES = st.dictionaries(
    st.sampled_from(CLASSES),
    st.builds(ClassRule, st.integers(1, 10).map(float), st.integers(0, 9)),
)
COUNTS = st.dictionaries(st.sampled_from(CLASSES), st.integers(0, 20))


@given(RULES, COUNTS, COUNTS, st.integers(1, 4))
def test_no_class_is_owed_more_than_waits_or_lacks(
    rules: dict[int, ClassRule], held: dict[int, int], waiting: dict[int, int], brokers: int
) -> None:
    shares = ClassShares(rules)
    owed = slots_owed(shares, held, waiting, brokers=brokers)
    for each in CLASSES:
        lacking = max(0, shares.floor(each, brokers) - held.get(each, 0))
        assert owed[each] == min(waiting.get(each, 0), lacking)


@given(RULES, COUNTS, st.integers(0, 40), st.integers(1, 4))
def test_no_class_gives_up_a_slot_of_its_floor_and_none_but_rollouts_give_any(
    rules: dict[int, ClassRule], held: dict[int, int], count: int, brokers: int
) -> None:
    shares = ClassShares(rules)
    above = {each: max(0, held.get(each, 0) - shares.floor(each, brokers)) for each in CLASSES}
    lenders = choose_lenders(shares, held, count, brokers=brokers)
    assert all(lenders[each] <= above[each] for each in CLASSES)
    assert set(lenders) <= set(PREEMPTED_CLASSES)
    assert lenders.total() == min(count, sum(above[each] for each in PREEMPTED_CLASSES))


@given(RULES, COUNTS, st.integers(0, 40))
def test_who_is_asked_for_more_slots_gives_up_no_fewer(
    rules: dict[int, ClassRule], held: dict[int, int], count: int
) -> None:
    shares = ClassShares(rules)
    fewer = choose_lenders(shares, held, count, brokers=1)
    more = choose_lenders(shares, held, count + 1, brokers=1)
    assert not fewer - more


broker_with = functools.partial(start_with_floor, floor=2)


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def preempt(broker: Broker, *, later_s: float = RESCAN_S) -> None:
    """What the broker does at a time from now."""
    broker.preemptor.preempt(now_s=time.monotonic() + later_s)
    await settle()


async def served(broker: Broker, key: str, count: int = 1) -> list[Response]:
    """Sandboxes of people, for which rollouts make room."""
    return await launched(broker, request(key, count, lease_class=SERVING))


def waiting_on(nodes: MemoryHostClient, name: str = "n1") -> set[str]:
    return {each for each, held in nodes.held[name].items() if held.preempted}


async def test_a_class_below_its_floor_gets_slots_while_rollouts_hold_them_all() -> None:
    nodes = MemoryHostClient(slots=4)
    broker = broker_with(nodes)
    rollouts = await some(broker, request("a", 4), 4)

    await served(broker, "s", 2)

    assert len(waiting_on(nodes)) == 2
    assert broker.ledger.slots.by_class == Counter({TRAINING: 2, SERVING: 2})
    assert {each.lease.lease_id for each in rollouts} <= broker.ledger.leases.keys()
    assert make_report(broker).preempted == 2


async def test_rollouts_go_on_as_soon_as_there_is_room_before_others_start() -> None:
    nodes = MemoryHostClient(slots=4)
    broker = broker_with(nodes)
    await some(broker, request("a", 4), 4)
    people = await served(broker, "s", 2)
    later = asyncio.create_task(launched(broker, request("b")))
    await settle()

    expect_nobody(broker)
    await broker.release([each.lease.lease_id for each in people])
    await settle()

    assert waiting_on(nodes) == set()
    assert not later.done()
    later.cancel()


async def test_a_floor_gets_the_next_slots_before_rollouts_go_on() -> None:
    nodes = MemoryHostClient(slots=4)
    broker = broker_with(nodes)
    await some(broker, request("a", 4), 4)
    (first, _) = await served(broker, "s", 2)
    asking = asyncio.create_task(launched(broker, request("t", lease_class=SERVING)))
    await settle()

    await broker.release([first.lease.lease_id])
    await asking

    assert len(waiting_on(nodes)) == 2


async def test_nothing_is_paused_beyond_a_floor() -> None:
    nodes = MemoryHostClient(slots=4)
    broker = broker_with(nodes)
    await some(broker, request("a", 4), 4)
    asking = asyncio.create_task(some(broker, request("s", 3, lease_class=SERVING), 2))
    await settle()

    await preempt(broker)
    await preempt(broker)

    assert len(waiting_on(nodes)) == 2
    await asking


async def test_an_environment_in_a_turn_is_not_paused_and_another_one_is() -> None:
    nodes = MemoryHostClient(slots=3)
    broker = broker_with(nodes, floor=1)
    rollouts = await some(broker, request("a", 3), 3)
    nodes.busy = {each.lease.lease_id for each in rollouts[1:]}

    await served(broker, "s")

    assert waiting_on(nodes) == {rollouts[0].lease.lease_id}


async def test_a_host_that_cannot_pause_is_passed_over() -> None:
    nodes = MemoryHostClient(slots=2)
    broker = broker_with(nodes, "n1", "n2", floor=1)
    await some(broker, request("a", 4), 4)
    hosts = {host.node_id: host for host in broker.ledger.hosts}
    hosts["n1"].can_preempt = False

    await served(broker, "s")

    assert waiting_on(nodes, "n1") == set()
    assert len(waiting_on(nodes, "n2")) == 1
    assert make_report(broker).unpreemptible_nodes == 1


async def test_an_environment_that_was_just_resumed_is_paused_after_all_others() -> None:
    nodes = MemoryHostClient(slots=3)
    broker = broker_with(nodes, floor=1)
    (older,) = await some(broker, request("a"), 1)
    await some(broker, request("b"), 1)
    (newest,) = await some(broker, request("c"), 1)
    newest_id = newest.lease.lease_id
    broker.ledger.set_preempted(newest_id, is_preempted=True, now_s=time.monotonic())
    broker.ledger.set_preempted(newest_id, is_preempted=False, now_s=time.monotonic())

    await served(broker, "s")

    assert len(waiting_on(nodes)) == 1
    assert not waiting_on(nodes) & {older.lease.lease_id, newest_id}


async def test_a_person_does_not_wait_for_environments_that_were_just_resumed() -> None:
    nodes = MemoryHostClient(slots=1)
    broker = broker_with(nodes, floor=1)
    await some(broker, request("a"), 1)
    (rollout_id,) = nodes.held["n1"]
    broker.ledger.set_preempted(rollout_id, is_preempted=True, now_s=time.monotonic())
    broker.ledger.set_preempted(rollout_id, is_preempted=False, now_s=time.monotonic())

    await served(broker, "s")

    assert waiting_on(nodes) == {rollout_id}


async def test_people_who_come_while_a_host_pauses_ask_for_slots_of_their_own() -> None:
    nodes = MemoryHostClient(slots=4)
    broker = broker_with(nodes, floor=3)
    await some(broker, request("a", 4), 4)
    people = [asyncio.create_task(served(broker, name)) for name in "stu"]
    await asyncio.sleep(0)  # each has asked, and no host has answered

    await asyncio.gather(*people)

    assert len(waiting_on(nodes)) == 3
    assert broker.ledger.slots.by_class == Counter({TRAINING: 1, SERVING: 3})


async def test_environments_take_turns_in_waiting() -> None:
    nodes = MemoryHostClient(slots=2)
    broker = broker_with(nodes, floor=1)
    await some(broker, request("a", 2), 2)
    await served(broker, "s")
    (first,) = waiting_on(nodes)
    broker.preemptor.rotate(now_s=time.monotonic() + SHIFT_S / 2)
    await settle()
    assert waiting_on(nodes) == {first}

    broker.preemptor.rotate(now_s=time.monotonic() + 2 * SHIFT_S)
    await settle()

    (second,) = waiting_on(nodes)
    assert second != first
    assert broker.ledger.slots.by_class == Counter({TRAINING: 1, SERVING: 1})


async def test_a_new_broker_lets_go_on_what_the_last_one_had_paused() -> None:
    nodes = MemoryHostClient(slots=2)
    broker = broker_with(nodes)
    await some(broker, request("a", 2), 2)
    people = await served(broker, "s", 2)

    successor = broker_with(nodes)
    assert successor.ledger.slots.num_preempted == 2
    assert successor.ledger.num_free == 0
    await successor.release([each.lease.lease_id for each in people])
    await settle()

    assert waiting_on(nodes) == set()
    assert successor.ledger.slots.by_class[TRAINING] == 2


async def test_a_host_with_paused_environments_alone_is_not_empty() -> None:
    nodes = MemoryHostClient(slots=1)
    broker = broker_with(nodes, floor=1)
    await some(broker, request("a"), 1)
    await served(broker, "s")
    (host,) = broker.ledger.hosts
    assert host.num_held == 2
    assert host.free == 0


@pytest.mark.parametrize("fails", ["pause", "go on"])
async def test_a_host_that_does_not_answer_loses_no_lease(fails: str) -> None:
    nodes = MemoryHostClient(slots=2)
    broker = broker_with(nodes)
    await some(broker, request("a", 2), 2)
    if fails == "go on":
        people = await served(broker, "s", 2)
        nodes.failing = {"n1"}
        await broker.release([each.lease.lease_id for each in people])
    else:
        nodes.failing = {"n1"}
        asking = asyncio.create_task(some(broker, request("s", lease_class=SERVING), 1))
        await settle()
        asking.cancel()
    await settle()

    expect_nobody(broker)
    nodes.failing = set()
    for _ in range(2):
        answer = broker.heartbeat(nodes.heartbeat("n1"))
        await nodes.close("n1", answer.close_lease_ids)
        await settle()
    later_s = time.monotonic() + MOST_RETRY_S
    broker.preemptor.resume(broker.ledger.hosts, spare=2, now_s=later_s)
    await settle()

    assert waiting_on(nodes) == set()
    assert broker.ledger.slots.by_class[TRAINING] == 2
