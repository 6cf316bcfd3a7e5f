"""Nodes that their pool gives up, and nodes that get empty so that it can."""

import asyncio
import time
from dataclasses import dataclass, field

import pytest
from tests.support.environments.brokers import PATIENCE_S, launched, pool, request, started

from etude.common.api.pool.autoscaling import Autoscaling
from etude.common.errors import UnavailableError
from etude.common.plans.registry import PlanRegistry
from etude.envserver.broker.broker import Broker
from etude.envserver.broker.host_client import MemoryHostClient
from etude.envserver.broker.hosts import MOST_S, HostDrains, Hosts
from etude.envserver.broker.pool_report import make_report, unix_ms
from etude.v1 import environments_pb2, plan_pb2

HOLD_S = 15.0
SIZED = pool().model_copy(
    update={"replicas": None, "max_replicas": 9, "autoscaling": Autoscaling()}
)


def members(*names: str) -> Hosts:
    found = Hosts()
    for name in names:
        told = environments_pb2.HeartbeatRequest(node_id=name, endpoint=name, slots=4)
        found.apply_heartbeat(told, now_s=0.0)
    return found


def test_a_host_that_shall_go_gets_nothing_more_until_it_is_wanted_again() -> None:
    nodes = members("a", "b")
    vacating = HostDrains(nodes)
    assert vacating.start_drain(["a"], hold_s=HOLD_S, now_s=0.0) == ["a"]
    assert [node.takes("python") for node in nodes] == [False, True]
    assert vacating.start_drain(["b"], hold_s=HOLD_S, now_s=1.0) == ["b"]
    assert [node.takes("python") for node in nodes] == [True, False]


def test_a_host_with_a_lease_an_order_or_something_to_close_is_not_empty() -> None:
    nodes = members("leased", "ordered", "closing", "idle")
    nodes[0].leases.add("x")
    nodes[1].opening = 1
    nodes[2].closing.add("x")
    names = [node.node_id for node in nodes]
    assert HostDrains(nodes).start_drain(names, hold_s=HOLD_S, now_s=0.0) == ["idle"]


def test_a_host_that_is_unknown_holds_nothing() -> None:
    assert HostDrains(members()).start_drain(["gone"], hold_s=HOLD_S, now_s=0.0) == ["gone"]


def test_whoever_forgets_a_host_does_not_keep_its_slots() -> None:
    nodes = members("a")
    vacating = HostDrains(nodes)
    vacating.start_drain(["a"], hold_s=HOLD_S, now_s=0.0)
    vacating.update(now_s=HOLD_S - 0.1)
    assert not nodes[0].is_open
    vacating.update(now_s=HOLD_S)
    assert nodes[0].is_open
    vacating.start_drain(["a"], hold_s=1e9, now_s=0.0)
    vacating.update(now_s=MOST_S)
    assert nodes[0].is_open


def test_idle_begins_when_the_last_lease_ends() -> None:
    nodes = members("a")
    vacating = HostDrains(nodes)
    nodes[0].leases.add("x")
    vacating.update(now_s=1.0)
    assert nodes[0].idle_since_s is None
    nodes[0].leases.clear()
    vacating.update(now_s=2.0)
    vacating.update(now_s=3.0)
    assert nodes[0].idle_since_s == 2.0


async def test_a_broker_that_hears_its_hosts_does_not_call_any_of_them_empty() -> None:
    broker = Broker(pool(), MemoryHostClient())
    with pytest.raises(UnavailableError):
        broker.drain_hosts(["n1"], hold_s=HOLD_S)


async def test_leases_go_to_other_hosts_than_those_that_shall_go() -> None:
    nodes = MemoryHostClient(slots=4)
    broker = started(nodes, "n1", "n2")
    assert broker.drain_hosts(["n1"], hold_s=HOLD_S) == ["n1"]
    outcomes = await launched(broker, request(count=4))
    assert {outcome.lease.endpoint for outcome in outcomes} == {"n2"}
    assert broker.drain_hosts(["n1", "n2"], hold_s=HOLD_S) == ["n1"]


@dataclass
class Taken:
    """Which nodes get leases."""

    endpoints: list[str] = field(default_factory=list)


async def test_a_pool_that_sizes_itself_fills_one_host_after_the_other() -> None:
    nodes = MemoryHostClient(slots=8)
    broker = started(nodes, *(f"n{place}" for place in range(12)), spec=SIZED)
    taken = Taken()
    for key in range(8):
        taken.endpoints += [o.lease.endpoint for o in await launched(broker, request(f"k{key}"))]
    assert set(taken.endpoints) == {"n0"}


async def test_a_pool_of_a_fixed_size_spreads_leases() -> None:
    nodes = MemoryHostClient(slots=8)
    broker = started(nodes, *(f"n{place}" for place in range(12)))
    taken = Taken()
    for key in range(8):
        taken.endpoints += [o.lease.endpoint for o in await launched(broker, request(f"k{key}"))]
    assert len(set(taken.endpoints)) > 3


async def test_the_report_tells_hosts_leases_and_plans() -> None:
    nodes = MemoryHostClient(slots=4)
    broker = started(nodes, "n1", "n2", spec=SIZED)
    await launched(broker, request(count=3))
    now_ms = round(1000 * time.time())
    broker.report_plan(
        "run",
        plan_pb2.RolloutPlan(
            version=5,
            made_unix_ms=now_ms,
            valid_until_unix_ms=now_ms + 60_000,
            waves=[plan_pb2.Wave(template="python", count=8, start_s=30, start_sigma_s=2)],
        ),
    )
    async with asyncio.timeout(PATIENCE_S):
        await broker.tick()
    told = make_report(broker)
    assert {each.node_id: each.held for each in told.members} == {"n1": 3, "n2": 0}
    idle = {each.node_id: each.idle_since_unix_ms > 0 for each in told.members}
    assert idle == {"n1": False, "n2": True}
    assert [(each.template, each.count) for each in told.held] == [("python", 3)]
    (plan,) = told.plans
    assert (plan.run_id, plan.version, plan.ratio) == ("run", 5, 1.0)
    (wave,) = plan.waves
    assert (wave.template, wave.count, wave.start_sigma_s) == ("python", 8, 2.0)
    ahead_s = (wave.start_unix_ms - unix_ms(time.monotonic())) / 1000
    assert 0 < ahead_s <= 30


async def test_no_time_that_a_run_names_keeps_the_operator_from_hearing_of_the_pool() -> None:
    broker = started(MemoryHostClient(slots=4), "n1")
    wave = plan_pb2.Wave(template="python", count=1, start_s=-86_400.0)
    for run_id, made, until in (("past", -(2**63), 2**63 - 1), ("future", 2**63 - 2, 2**63 - 1)):
        told = plan_pb2.RolloutPlan(made_unix_ms=made, valid_until_unix_ms=until, waves=[wave])
        broker.report_plan(run_id, told)
    day_ms = 86_400_000
    for plan in make_report(broker).plans:
        assert plan.until_unix_ms - plan.heard_unix_ms <= day_ms
        assert plan.heard_unix_ms - plan.waves[0].start_unix_ms == day_ms


async def test_a_plan_that_cannot_be_told_leaves_the_others_to_be_told() -> None:
    broker = started(MemoryHostClient(slots=4), "n1")
    plans = broker.warm_targets.plans
    for run_id in ("a", "b"):
        told = plan_pb2.RolloutPlan(version=1, valid_until_unix_ms=60_000)
        plans.report(run_id, told, now_s=time.monotonic())
    plans.current(now_s=0.0)["a"].version = 1 << 64

    assert [plan.run_id for plan in make_report(broker).plans] == ["b"]


async def test_the_report_says_how_long_leases_last() -> None:
    broker = started(MemoryHostClient())
    broker.statistics.lease_s.extend(float(each) for each in range(1, 101))
    told = {each.share: each.seconds for each in make_report(broker).lease_seconds}
    assert told[0.5] == 51.0
    assert list(told) == sorted(told)
    assert list(told.values()) == sorted(told.values())


def test_a_plan_remembers_when_it_was_heard() -> None:
    plans = PlanRegistry({"python"})
    told = plan_pb2.RolloutPlan(version=1, made_unix_ms=0, valid_until_unix_ms=60_000)
    plans.report("run", told, now_s=12.0)
    assert plans.current(now_s=12.0)["run"].received_s == 12.0
