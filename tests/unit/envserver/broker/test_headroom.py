"""Free slots for people: kept by their demand of the last minutes, lent beyond that."""

import asyncio
import functools
import time
from collections import Counter

from tests.support.environments.brokers import (
    Response,
    expect_nobody,
    launched,
    request,
    some,
    start_with_floor,
)

from etude.common.api.pool.lease_classes import LeaseClass, LeaseClassName
from etude.common.api.pool.spec import LeasePolicy
from etude.envserver.broker.broker import Broker
from etude.envserver.broker.host_client import MemoryHostClient
from etude.envserver.broker.pool_report import make_report
from etude.envserver.broker.shards.peers import Peers
from etude.envserver.broker.shards.router import ShardRouter
from etude.v1 import environments_pb2

SERVING = environments_pb2.LEASE_CLASS_SERVING
TRAINING = environments_pb2.LEASE_CLASS_TRAINING


broker_with = functools.partial(start_with_floor, floor=6)


async def settle() -> None:
    for _ in range(30):
        await asyncio.sleep(0)


async def served(broker: Broker, key: str, count: int = 1) -> list[Response]:
    found = await launched(broker, request(key, count, lease_class=SERVING))
    await settle()
    return found


async def release(broker: Broker, people: list[Response]) -> None:
    await broker.release([each.lease.lease_id for each in people])
    await settle()


def preempted(nodes: MemoryHostClient) -> int:
    return sum(each.preempted for held in nodes.held.values() for each in held.values())


async def test_a_floor_that_nobody_has_asked_for_is_lent_as_a_whole() -> None:
    nodes = MemoryHostClient(slots=8)
    broker = broker_with(nodes)
    await some(broker, request("a", 8), 8)
    assert broker.ledger.slots.by_class == Counter({TRAINING: 8})


async def test_rollouts_are_paused_for_the_next_person_before_there_is_one() -> None:
    nodes = MemoryHostClient(slots=8)
    broker = broker_with(nodes)
    await some(broker, request("a", 8), 8)

    await served(broker, "s")

    assert preempted(nodes) == 2
    assert broker.ledger.num_free == 1


async def test_a_burst_is_made_room_for_again_before_it_comes() -> None:
    nodes = MemoryHostClient(slots=10)
    broker = broker_with(nodes)
    await some(broker, request("a", 9), 9)
    people = await served(broker, "s", 4)
    await release(broker, people)

    assert broker.ledger.num_free == 6, "four were here at once, and a third more may come"
    assert preempted(nodes) == 5
    orders = nodes.orders
    again = await served(broker, "t", 4)
    assert nodes.orders == orders + 1, "one order for all: each found a slot"
    assert preempted(nodes) == 5

    await release(broker, again)
    assert preempted(nodes) == 5, "rollouts are not paused and resumed with each burst"


async def test_rollouts_get_the_slots_back_once_bursts_have_ended() -> None:
    nodes = MemoryHostClient(slots=10)
    broker = broker_with(nodes)
    await some(broker, request("a", 9), 9)
    await release(broker, await served(broker, "s", 4))
    assert preempted(nodes) == 5

    expect_nobody(broker)
    await broker.tick()
    await settle()

    assert preempted(nodes) == 0


async def test_new_rollouts_do_not_take_what_is_kept_for_people() -> None:
    nodes = MemoryHostClient(slots=10)
    broker = broker_with(nodes)
    await release(broker, await served(broker, "s", 4))

    rollouts = asyncio.create_task(launched(broker, request("a", 10)))
    await settle()

    assert broker.ledger.slots.by_class == Counter({TRAINING: 4})
    report = make_report(broker)
    assert (report.reserved, report.waiting) == (6, 6)
    router = ShardRouter(broker, Peers(name=broker.shard))
    assert router.make_load().free == 0, "no other broker sends rollouts here"
    rollouts.cancel()


async def test_slots_of_ended_leases_count_as_free_before_their_hosts_have_closed_them() -> None:
    nodes = MemoryHostClient(slots=10)
    broker = broker_with(nodes)
    await some(broker, request("a", 9), 9)
    people = await served(broker, "s", 4)
    before = preempted(nodes)
    nodes.failing = {"n1"}
    await release(broker, people)
    nodes.failing = set()

    broker.preemptor.preempt(now_s=time.monotonic() + 1)
    await settle()

    assert preempted(nodes) == before


async def test_a_pool_without_floors_keeps_nothing() -> None:
    nodes = MemoryHostClient(slots=4)
    broker = broker_with(nodes, floor=0)
    await release(broker, await served(broker, "s", 2))
    await some(broker, request("a", 4), 4)
    assert broker.ledger.num_free == 0
    assert make_report(broker).reserved == 0


async def test_hosts_whose_environments_are_in_turns_are_asked_again_soon() -> None:
    nodes = MemoryHostClient(slots=2)
    broker = broker_with(nodes, floor=1)
    rollouts = await some(broker, request("a", 1), 1)
    await served(broker, "s")
    assert preempted(nodes) == 0, "there was a slot"
    nodes.busy = {each.lease.lease_id for each in rollouts}
    broker.replace_spec(
        broker.spec.model_copy(
            update={
                "lease": LeasePolicy(
                    classes=(LeaseClass(name=LeaseClassName.SERVING, floor_slots=2),)
                )
            }
        )
    )
    asking = asyncio.create_task(served(broker, "t"))
    await settle()
    assert preempted(nodes) == 0

    nodes.busy = set()
    await asking

    assert preempted(nodes) == 1
