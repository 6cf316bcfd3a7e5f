"""What a broker makes ready ahead of a launch, and where groups and snapshots start."""

import asyncio
import time

import pytest
from tests.support.environments.brokers import launched, request, started

from etude.common.errors import UnknownIdError
from etude.envserver.broker.broker import Broker
from etude.envserver.broker.host_client import MemoryHostClient
from etude.v1 import environments_pb2, plan_pb2


async def some_seconds_pass(broker: Broker) -> None:
    """What is decided once a second is decided again."""
    broker.warm_targets._decided_s = 0.0
    await broker.tick()


def plan(version: int = 1, count: int = 6, start_s: float = 1.0) -> plan_pb2.RolloutPlan:
    now_ms = round(1000 * time.time())
    wave = plan_pb2.Wave(template="python", count=count, start_s=start_s)
    return plan_pb2.RolloutPlan(
        version=version, made_unix_ms=now_ms, valid_until_unix_ms=now_ms + 60_000, waves=[wave]
    )


def warm(broker: Broker, nodes: MemoryHostClient, *endpoints: str) -> dict[str, int]:
    """Paused clones that each node is told to have."""
    answers = {name: broker.heartbeat(nodes.heartbeat(name)) for name in endpoints}
    return {name: sum(t.paused_clones for t in answer.warm) for name, answer in answers.items()}


async def test_a_plan_makes_hosts_warm_up_until_its_groups_have_come() -> None:
    nodes = MemoryHostClient(slots=10)
    broker = started(nodes, "n1", "n2")

    (ready,) = broker.report_plan("run", plan(count=6))
    await some_seconds_pass(broker)
    assert warm(broker, nodes, "n1", "n2") == {"n1": 3, "n2": 3}
    assert ready.ready_by_unix_ms == 0

    await launched(broker, request("a", count=4, group_id="g"))
    await some_seconds_pass(broker)
    assert sum(warm(broker, nodes, "n1", "n2").values()) == 2


async def test_a_launch_outside_of_groups_takes_nothing_from_a_plan() -> None:
    nodes = MemoryHostClient(slots=10)
    broker = started(nodes)
    broker.report_plan("run", plan(count=2))

    await launched(broker, request("grade", count=4))
    await some_seconds_pass(broker)

    assert warm(broker, nodes, "n1") == {"n1": 2}


async def test_a_prepared_group_starts_on_its_host() -> None:
    nodes = MemoryHostClient(slots=100)
    names = [f"n{n}" for n in range(20)]
    broker = started(nodes, *names)
    asked = environments_pb2.PrepareGroupRequest(
        run_id="run", group_id="g", template="python", count=4
    )

    broker.prepare(asked)
    await some_seconds_pass(broker)
    (chosen,) = [name for name, count in warm(broker, nodes, *names).items() if count]
    outcomes = await launched(broker, request(count=4, group_id="g"))

    assert {o.lease.endpoint for o in outcomes} == {chosen}


async def test_siblings_share_a_host_also_when_they_come_in_parts() -> None:
    nodes = MemoryHostClient(slots=4)
    broker = started(nodes, *(f"n{n}" for n in range(20)))

    first = await launched(broker, request("a", count=3, group_id="g"))
    rest = await launched(broker, request("b", count=2, group_id="g"))

    (home,) = {o.lease.endpoint for o in first}
    assert [o.lease.endpoint for o in rest].count(home) == 1


async def test_a_snapshot_is_taken_up_where_it_is_held() -> None:
    nodes = MemoryHostClient()
    broker = started(nodes, *(f"n{n}" for n in range(8)))
    nodes.snapshots["n5"] = [
        environments_pb2.HeldSnapshot(snapshot_id="s", run_id="run", template="python")
    ]
    broker.heartbeat(nodes.heartbeat("n5"))

    outcomes = await launched(broker, request(count=4, snapshot_id="s"))

    assert {o.lease.endpoint for o in outcomes} == {"n5"}


async def test_what_waits_for_a_snapshot_ends_when_its_host_is_lost() -> None:
    nodes = MemoryHostClient(slots=1)
    broker = started(nodes, "n0", "n1")
    nodes.snapshots["n0"] = [
        environments_pb2.HeldSnapshot(snapshot_id="s", run_id="run", template="python")
    ]
    broker.heartbeat(nodes.heartbeat("n0"))
    waiting = asyncio.create_task(launched(broker, request(count=2, snapshot_id="s")))
    await asyncio.sleep(0.05)

    nodes.snapshots.clear()
    broker.heartbeat(nodes.heartbeat("n0"))
    await broker.tick()

    one, other = await waiting
    assert one.HasField("lease")
    assert other.failure.reason == "SnapshotLost"


@pytest.mark.parametrize("owner", ["another-run", None])
async def test_a_snapshot_of_another_run_is_as_unknown_as_one_of_nobody(owner: str | None) -> None:
    nodes = MemoryHostClient()
    broker = started(nodes)
    if owner is not None:
        held = environments_pb2.HeldSnapshot(snapshot_id="s", run_id=owner, template="python")
        nodes.snapshots["n1"] = [held]
        broker.heartbeat(nodes.heartbeat("n1"))

    with pytest.raises(UnknownIdError, match="no host holds snapshot 's' of run 'run'"):
        await launched(broker, request(snapshot_id="s"))
