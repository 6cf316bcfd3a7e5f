"""Classes of leases: floors, weights in slot-seconds, and no slot that stays empty."""

import asyncio
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from tests.support.environments.brokers import request, some

from etude.common.api.pool.lease_classes import LeaseClass, LeaseClassName
from etude.common.api.pool.spec import EnvPoolSpec, LeasePolicy, Template
from etude.envserver.broker.broker import REBUILD_S, Broker
from etude.envserver.broker.classes.queues import class_rules
from etude.envserver.broker.classes.shares import ClassRule, ClassShares
from etude.envserver.broker.host_client import MemoryHostClient
from etude.v1 import environments_pb2

CLASSES = (1, 2, 3, 4)
RULES = st.dictionaries(
    st.sampled_from(CLASSES),
    st.builds(ClassRule, st.integers(1, 10).map(float), st.integers(0, 6)),
)
HELD = st.dictionaries(st.sampled_from(CLASSES), st.integers(0, 12))
WAITING = st.sets(st.sampled_from(CLASSES), min_size=1)


@given(RULES, HELD, WAITING, st.integers(1, 4))
def test_no_class_gets_more_while_another_waits_below_its_floor(
    rules: dict[int, ClassRule], held: dict[int, int], waiting: set[int], brokers: int
) -> None:
    found = ClassShares(rules).choose(waiting, held, brokers=brokers)
    assert found in waiting
    floors = {each: -(-rules.get(each, ClassRule()).floor // brokers) for each in CLASSES}
    below = {each for each in waiting if held.get(each, 0) < floors[each]}
    assert found in (below or waiting)


@given(RULES, st.lists(st.tuples(WAITING, st.floats(0.1, 60)), min_size=1, max_size=30))
def test_use_is_counted_from_the_class_that_has_used_least(
    rules: dict[int, ClassRule], periods: list[tuple[set[int], float]]
) -> None:
    shares = ClassShares(rules)
    for held, passed_s in periods:
        shares.record_use(Counter(held), held, passed_s=passed_s)
        assert min(shares.used.values()) == 0


@given(st.integers(1, 6), st.integers(1, 6), st.integers(2, 20))
def test_slot_seconds_follow_the_weights(first: int, second: int, slots: int) -> None:
    shares = ClassShares({1: ClassRule(first), 2: ClassRule(second)})
    used = served(shares, slots, rounds=600)
    whole = first + second
    assert abs(used[1] / sum(used.values()) - first / whole) < 0.06
    assert sum(used.values()) == 600 * slots, "a slot stayed empty while something waited"


@given(st.integers(2, 12), st.integers(1, 1_000))
def test_every_class_that_waits_is_served(slots: int, weight: int) -> None:
    shares = ClassShares({1: ClassRule(float(weight), slots - 1)})
    used = served(shares, slots, rounds=400 + 40 * weight)
    assert used[2] > 0


def test_a_class_that_was_idle_saves_nothing_up() -> None:
    shares = ClassShares()
    for _ in range(1_000):
        shares.record_use({1: 10}, [1], passed_s=1.0)
    shares.record_use({1: 10}, [1, 2], passed_s=0.0)
    assert shares.used[2] == shares.used[1] == 0


def served(shares: ClassShares, slots: int, *, rounds: int) -> Counter[int]:
    """Slot-seconds of two classes that always wait, with leases of 3 and of 7 seconds."""
    lasts = {1: 3, 2: 7}
    ends: list[tuple[int, int]] = []
    used: Counter[int] = Counter()
    for now in range(rounds):
        ends = [(at, each) for at, each in ends if at > now]
        held = Counter(each for _, each in ends)
        while len(ends) < slots:
            each = shares.choose([1, 2], held)
            held[each] += 1
            ends.append((now + lasts[each], each))
        used += held
        shares.record_use(held, [1, 2], passed_s=1.0)
    return used


def pool(*classes: LeaseClass) -> EnvPoolSpec:
    return EnvPoolSpec(templates=(Template(name="python"),), lease=LeasePolicy(classes=classes))


async def test_a_launch_of_a_class_below_its_floor_comes_first_in_a_full_pool() -> None:
    serving = LeaseClass(name=LeaseClassName.SERVING, floor_slots=2)
    nodes = MemoryHostClient(slots=4)
    broker = Broker(pool(serving), nodes, started_s=-REBUILD_S)
    broker.heartbeat(nodes.heartbeat("n1"))
    held = await some(broker, request("a", 4), 4)
    later = asyncio.create_task(some(broker, request("b", 4), 1))
    await asyncio.sleep(0)
    asked = request("c", 1, lease_class=environments_pb2.LEASE_CLASS_SERVING)
    first = asyncio.create_task(some(broker, asked, 1))
    await asyncio.sleep(0)

    await broker.release([held[0].lease.lease_id])
    done, _ = await asyncio.wait([later, first], return_when=asyncio.FIRST_COMPLETED)

    assert done == {first}
    later.cancel()
    assert broker.ledger.slots.by_class[environments_pb2.LEASE_CLASS_SERVING] == 1


def test_each_class_of_a_pool_has_a_number_on_the_wire() -> None:
    made = tuple(LeaseClass(name=name, weight=3, floor_slots=5) for name in LeaseClassName)
    assert class_rules(made) == dict.fromkeys(CLASSES, ClassRule(3, 5, 300))


def test_classes_of_a_newer_spec_count_from_then_on() -> None:
    broker = Broker(pool(), MemoryHostClient())
    broker.replace_spec(pool(LeaseClass(name=LeaseClassName.GRADING, weight=7)))
    assert broker.queue.shares.rules == {environments_pb2.LEASE_CLASS_GRADING: ClassRule(7, 0, 300)}
