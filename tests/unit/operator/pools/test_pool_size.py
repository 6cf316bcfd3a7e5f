"""Size of a pool while brokers are silent, and after they report again."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from etude.common.api.kinds import EnvPool
from etude.operator.actions import ClockReading
from etude.operator.manifests import Manifest
from etude.operator.pools.autoscaling.config import TICK_S
from etude.operator.pools.autoscaling.values import ScalingCause
from etude.operator.pools.health import ProvisionTracker
from etude.operator.pools.observe import ObservedPool
from etude.operator.pools.size import PoolSize, PoolSizer
from etude.operator.remotes.report_store import BrokerReport, PoolReport
from etude.v1 import environments_pb2

WALL_S = 1.79e9


def pool(**scaling: Any) -> EnvPool:
    return EnvPool.parse_known_fields(
        {
            "apiVersion": "etude.dev/v1alpha1",
            "kind": "EnvPool",
            "metadata": {"name": "repos", "namespace": "lab", "uid": "uid-repos"},
            "spec": {
                "templates": [{"name": "python"}],
                "slotsPerReplica": 1,
                "maxReplicas": 2_000,
                "autoscaling": {"mode": "Reactive", **scaling},
            },
        }
    )


def node(ordinal: int, *, is_ready: bool = True) -> Manifest:
    ready = {"type": "Ready", "status": "True" if is_ready else "False"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"repos-node-{ordinal}", "namespace": "lab", "uid": f"uid-{ordinal}"},
        "status": {"conditions": [ready]},
    }


@dataclass
class Scene:
    """A pool of nodes of one slot each, whose nodes come and go as a test says."""

    pool: EnvPool
    nodes: list[Manifest]
    now_s: float = 0.0
    sizer: PoolSizer = field(default_factory=lambda: PoolSizer(ProvisionTracker()))
    report: PoolReport = field(default_factory=PoolReport)

    def say(self, leased: int = 0, waiting: int = 0, **more: Any) -> None:
        members = [
            environments_pb2.NodeFigures(node_id=each["metadata"]["name"], held=int(n < leased))
            for n, each in enumerate(self.nodes)
        ]
        said = environments_pb2.WatchPoolResponse(
            told_unix_ms=round(1000 * self.now_s),
            leased=leased,
            waiting=waiting,
            members=members,
            **more,
        )
        self.report.by_broker[0] = BrokerReport(said, self.now_s)

    def tick(self) -> PoolSize:
        found = self.sizer.decide_size(
            self.pool,
            ObservedPool(hosts=self.nodes, report=self.report),
            ClockReading(WALL_S + self.now_s, self.now_s),
        )
        self.now_s += TICK_S
        return found

    def last(self, seconds: int, **said: Any) -> PoolSize:
        """The same is said for a while; nothing, and brokers are silent."""
        found = []
        for _ in range(round(seconds / TICK_S)):
            if said:
                self.say(**said)
            found.append(self.tick())
        return found[-1]


@pytest.mark.parametrize("silent_s", [20, 70, 130, 600])
@pytest.mark.parametrize("mode", ["Reactive", "Predictive"])
def test_the_first_words_after_a_silence_shrink_nothing(mode: str, silent_s: int) -> None:
    """A broker that was replaced has not heard its nodes yet, and knows of no lease."""
    scene = Scene(pool(mode=mode), [node(n) for n in range(38)])
    assert scene.last(300, leased=30).desired == 38
    found = scene.last(silent_s)
    assert found.decision is not None
    assert (found.desired, found.decision.cause) == (38, ScalingCause.UNKNOWN)
    for _ in range(20):
        scene.say()
        found = scene.tick()
        assert (found.desired, found.retiring) == (38, ())
    assert scene.last(300, leased=0).desired < 38, "once the windows are full"


def test_a_pool_that_grows_as_its_brokers_fall_silent_grows_no_further() -> None:
    scene = Scene(pool(refill={"maxPerSecond": 5, "maxInFlight": 20}), [])
    there = []
    for tick in range(40):
        if tick < 3:
            scene.say(waiting=1_000)
        new = max(0, scene.tick().limit - len(scene.nodes))
        scene.nodes += [node(len(scene.nodes) + n, is_ready=False) for n in range(new)]
        # Those of the first half are ready.
        scene.nodes[:5] = [node(n) for n in range(len(scene.nodes[:5]))]
        there.append(len(scene.nodes))

    last_heard = there[9]
    assert 10 < last_heard < 50
    assert there[9:] == [last_heard] * 31


def test_hosts_that_are_lost_while_brokers_are_silent_are_replaced_within_the_budget() -> None:
    refill = {"maxPerSecond": 1, "maxInFlight": 5}
    full = pool(refill=refill, targetUtilizationPercent=100)
    scene = Scene(full, [node(n) for n in range(100)])
    scene.last(20, leased=100)
    scene.last(20)
    scene.nodes = scene.nodes[:60]
    made = []
    for _ in range(60):
        found = scene.tick()
        new = max(0, found.limit - len(scene.nodes))
        made.append(new)
        # Each takes until the next tick.
        scene.nodes += [node(1_000 + len(scene.nodes) + n) for n in range(new)]

    assert max(made) <= 2
    assert len(scene.nodes) == 100


@pytest.mark.parametrize("grace_s", [0, 30])
def test_hosts_that_never_end_on_a_lost_node_do_not_block_the_creation_of_others(
    grace_s: int,
) -> None:
    going = {"deletionTimestamp": "2026-01-01T00:00:00Z", "deletionGracePeriodSeconds": grace_s}
    lost = [node(100 + n, is_ready=False) for n in range(20)]
    for each in lost:
        each["metadata"] |= going
    scene = Scene(pool(), [*(node(n) for n in range(4)), *lost])
    found = scene.last(60 + grace_s, leased=4)
    assert found.decision is not None
    assert found.decision.is_hard_capped, "until then they may be a mistake of ours"

    found = scene.last(4, leased=4, waiting=6)
    assert found.decision is not None
    assert not found.decision.is_hard_capped
    assert found.limit >= 10


@pytest.mark.parametrize(("holder", "nodes"), [("planner", 40), ("another", 50)])
def test_leases_of_a_run_without_a_plan_keep_the_windows_of_a_pool_without_one(
    holder: str, nodes: int
) -> None:
    plan = environments_pb2.PlanFigures(
        run_id="planner", version=1, until_unix_ms=9_999_000, heard_unix_ms=300_000, ratio=1.0
    )
    scene = Scene(pool(mode="Predictive"), [node(n) for n in range(50)])
    found = scene.last(400, leased=40, leased_by_run={holder: 40}, plans=[plan])

    assert found.desired == nodes
