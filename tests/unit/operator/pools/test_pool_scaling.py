"""Pools that size themselves, from brokers' reports to hosts."""

from collections.abc import Mapping
from typing import Any

import pytest

from etude.common.api.kinds import EnvPool
from etude.operator.manifests import Ref
from etude.v1 import environments_pb2

KEY = Ref("EnvPool", "lab", "repos")
BROKER = "repos-broker-0.repos-broker:7020"
SLOTS = 4
BORN_MS = 1_000_000
"""When brokers are heard first, on their own clocks: those need not agree with ours."""


def body(mode: str = "Reactive", scaling: Mapping[str, Any] | None = None, **spec: Any) -> Any:
    return {
        "apiVersion": "etude.dev/v1alpha1",
        "kind": "EnvPool",
        "metadata": {"name": "repos", "namespace": "lab"},
        "spec": {
            "templates": [{"name": "python"}],
            "slotsPerReplica": SLOTS,
            "maxReplicas": 20,
            "autoscaling": {"mode": mode, **(scaling or {})},
            **spec,
        },
    }


def manual(replicas: int) -> Any:
    made = body()
    made["spec"] = {
        "templates": [{"name": "python"}],
        "slotsPerReplica": SLOTS,
        "replicas": replicas,
    }
    return made


class Pool:
    """A pool whose broker says what a test wants it to."""

    def __init__(self, lab: Any) -> None:
        self.lab = lab
        self.began_s = lab.clock.monotonic_s()

    @property
    def now_ms(self) -> int:
        passed_s: float = self.lab.clock.monotonic_s() - self.began_s
        return BORN_MS + round(1000 * passed_s)

    @property
    def status(self) -> Any:
        return EnvPool.model_validate(self.lab.cluster.objects()[KEY]).status

    @property
    def nodes(self) -> list[str]:
        found = (key.name for key in self.lab.cluster.objects() if key.kind == "Pod")
        return sorted(name for name in found if "-node-" in name)

    def condition(self, kind: str) -> tuple[str, str]:
        found = next(c for c in self.status.conditions if c.type == kind)
        return found.status, found.reason

    async def say(
        self, held: Mapping[str, int] | None = None, *, waiting: int = 0, **fields: Any
    ) -> None:
        """The broker reports: leases by node, and environments that wait."""
        held = held or {}
        self.lab.peers.hosts_in_use = {name for name, count in held.items() if count}
        members = [
            environments_pb2.NodeFigures(
                node_id=name,
                held=held.get(name, 0),
                idle_since_unix_ms=0 if held.get(name) else BORN_MS,
                cached=True,
            )
            for name in self.nodes
        ]
        report = environments_pb2.WatchPoolResponse(
            told_unix_ms=self.now_ms,
            slots=SLOTS * len(members),
            leased=sum(held.values()),
            waiting=waiting,
            members=members,
            **fields,
        )
        self.lab.peers.pools[BROKER].append(report)
        await self.lab.settle()

    async def last(self, seconds: int, held: Mapping[str, int] | None = None, **said: Any) -> None:
        """The same is true for a while."""
        for _ in range(seconds // 2):
            await self.lab.advance(2)
            await self.say(held, **said)
        await self.lab.advance(2)


def plan(pool: Pool, count: int, in_s: float, run: str = "stranger") -> Any:
    at_ms = pool.now_ms + round(1000 * in_s)
    wave = environments_pb2.PlannedWave(template="python", count=count, start_unix_ms=at_ms)
    return environments_pb2.PlanFigures(
        run_id=run,
        version=7,
        heard_unix_ms=pool.now_ms,
        until_unix_ms=pool.now_ms + 600_000,
        ratio=1.0,
        waves=[wave],
    )


async def started(lab: Any, manifest: Any) -> Pool:
    lab.cluster.upsert(manifest)
    await lab.settle()
    made = Pool(lab)
    await made.last(2)
    return made


async def test_a_pool_that_sizes_itself_keeps_one_host_while_nobody_asks(lab: Any) -> None:
    pool = await started(lab, body())
    assert pool.nodes == ["repos-node-0"]
    assert (pool.status.desired, pool.status.phase) == (1, "Ready")
    assert pool.condition("Available") == ("True", "NodesReady")


async def test_nothing_is_decided_before_every_broker_has_spoken(lab: Any) -> None:
    lab.cluster.upsert(body())
    await lab.settle()
    await lab.advance(10)
    pool = Pool(lab)
    assert pool.nodes == []
    assert pool.status.autoscaler.mode == "Unknown"


async def test_environments_that_wait_bring_hosts(lab: Any) -> None:
    pool = await started(lab, body())
    await pool.last(8, waiting=20)
    assert len(pool.nodes) >= 5
    assert pool.status.autoscaler.mode == "Panic"
    assert "a burst of 20 slots" in pool.status.autoscaler.last_reason
    assert pool.status.slots.queued == 20


async def test_a_pool_never_has_more_hosts_than_it_may(lab: Any) -> None:
    pool = await started(lab, body(maxReplicas=3))
    await pool.last(10, waiting=1_000)
    assert len(pool.nodes) == 3


async def test_hosts_come_no_faster_than_the_cluster_bears(lab: Any) -> None:
    refill = {"maxPerSecond": 1, "maxInFlight": 200}
    pool = await started(lab, body(scaling={"refill": refill, "maxScaleUpRate": 1000}))
    before = len(pool.nodes)
    await lab.advance(2)
    await pool.say(waiting=80)
    await lab.advance(2)
    assert before < len(pool.nodes) <= before + 4


async def test_a_plan_brings_hosts_before_its_wave(lab: Any) -> None:
    pool = await started(lab, body("Predictive"))
    await pool.say(plans=[plan(pool, 16, in_s=600)])
    await lab.advance(2)
    assert len(pool.nodes) == 1
    await pool.say(plans=[plan(pool, 16, in_s=20)])
    await lab.advance(2)
    assert len(pool.nodes) >= 4
    assert (pool.status.autoscaler.mode, pool.status.autoscaler.plan_peak) == ("Planned", 16)
    assert pool.status.autoscaler.plan_version == 7


async def test_mode_reactive_reads_no_plans(lab: Any) -> None:
    pool = await started(lab, body("Reactive"))
    await pool.last(4, plans=[plan(pool, 16, in_s=20)])
    assert len(pool.nodes) == 1


async def test_the_plan_of_a_suspended_run_counts_for_nothing(lab: Any, run_body: Any) -> None:
    lab.cluster.upsert(run_body(suspend=True))
    await lab.settle()
    pool = await started(lab, body("Predictive"))
    await pool.last(4, plans=[plan(pool, 16, in_s=20, run="uid-run")])
    assert len(pool.nodes) == 1
    lab.cluster.upsert(run_body(suspend=False))
    await lab.settle()
    await pool.last(4, plans=[plan(pool, 16, in_s=20, run="uid-run")])
    assert len(pool.nodes) >= 4


async def test_only_hosts_that_hold_nothing_go(lab: Any) -> None:
    scaling = {"scaleDownDelaySeconds": 10, "stableWindowSeconds": 10}
    pool = await started(lab, body(scaling=scaling))
    await pool.last(10, waiting=16)
    full = pool.nodes
    assert len(full) >= 4
    held = {full[1]: 1, full[3]: 1}
    await pool.last(60, held)
    assert set(held) <= set(pool.nodes)
    assert len(pool.nodes) < len(full)
    assert pool.status.desired == len(pool.nodes)


async def test_a_host_stays_as_long_as_a_broker_cannot_say_that_it_is_empty(lab: Any) -> None:
    scaling = {"scaleDownDelaySeconds": 10, "stableWindowSeconds": 10}
    pool = await started(lab, body(scaling=scaling))
    await pool.last(10, waiting=16)
    before = pool.nodes
    lab.peers.unresponsive.add(BROKER)
    await pool.last(60)
    assert pool.nodes == before
    assert pool.status.draining > 0
    lab.peers.unresponsive.clear()
    await pool.last(20)
    assert len(pool.nodes) < len(before)


async def test_a_host_that_was_leased_meanwhile_stays(lab: Any) -> None:
    """What brokers said last may be old: their answer to Drain is what counts."""
    scaling = {"scaleDownDelaySeconds": 10, "stableWindowSeconds": 10}
    pool = await started(lab, body(scaling=scaling))
    await pool.last(10, waiting=16)
    before = set(pool.nodes)

    async def nobody_is_empty(target: str, nodes: Any) -> frozenset[str]:
        return frozenset()

    lab.peers = Answering(nobody_is_empty)
    lab.reconciler.client = lab.peers
    await lab.advance(60)
    assert set(pool.nodes) == before


class Answering:
    """A broker that answers Drain as a test wants it to."""

    def __init__(self, drain: Any) -> None:
        self.drain = drain


async def test_silent_brokers_leave_a_pool_as_it_is(lab: Any) -> None:
    scaling = {"scaleDownDelaySeconds": 10, "stableWindowSeconds": 10}
    pool = await started(lab, body(scaling=scaling))
    await pool.last(10, waiting=16)
    before = pool.nodes
    for _ in range(60):
        await lab.advance(2)
    assert pool.nodes == before
    assert pool.status.autoscaler.mode == "Unknown"
    lab.cluster.purge(Ref("Pod", "lab", before[0]))
    await lab.advance(2)
    assert pool.nodes == before


async def test_an_operator_that_starts_anew_shrinks_nothing_on_empty_windows(lab: Any) -> None:
    pool = await started(lab, body())
    await pool.last(10, waiting=16)
    before = pool.nodes
    await lab.kill()
    await lab.settle()
    await pool.last(40)
    assert pool.nodes == before


async def test_an_idle_pool_goes_to_zero_and_is_still_available(lab: Any) -> None:
    zero = {"mode": "WhenIdle", "graceSeconds": 4}
    scaling = {"scaleToZero": zero, "stableWindowSeconds": 10, "scaleDownDelaySeconds": 0}
    pool = await started(lab, body(scaling=scaling))
    await pool.last(8, waiting=1)
    await pool.last(60)
    assert pool.nodes == []
    assert "repos-broker-0" in lab.names("Pod")
    assert pool.condition("Available") == ("True", "ScaledToZero")
    assert pool.status.phase == "ScaledToZero"
    await pool.last(4, waiting=1)
    assert len(pool.nodes) == 1


async def test_a_schedule_keeps_slots(lab: Any) -> None:
    scaling = {"schedule": [{"cron": "* * * * *", "minIdle": 10}]}
    pool = await started(lab, body(scaling=scaling))
    await pool.last(4)
    assert len(pool.nodes) == 3
    assert pool.status.autoscaler.mode == "Scheduled"


async def test_a_schedule_that_never_comes_true_is_refused_by_name(lab: Any) -> None:
    lab.cluster.upsert(body(scaling={"schedule": [{"cron": "0 0 30 2 *", "minIdle": 1}]}))
    await lab.settle()
    pool = Pool(lab)
    assert pool.condition("Accepted") == ("False", "InvalidParameters")
    assert "spec.autoscaling.schedule[0]" in pool.status.conditions[0].message


async def test_idle_slots_are_kept_beside_those_that_are_leased(lab: Any) -> None:
    pool = await started(lab, body(minIdle=8))
    await pool.last(4)
    assert len(pool.nodes) == 2
    await pool.last(4, {"repos-node-0": 4})
    assert len(pool.nodes) == 3


async def test_a_burst_that_would_have_to_wait_is_told(lab: Any) -> None:
    pool = await started(lab, body(scaling={"burstCapacity": 100}))
    assert pool.condition("BurstCapacityMet") == ("False", "BurstTooLarge")
    assert pool.condition("HardCapped") == ("False", "Healthy")


async def test_how_long_hosts_take_outlives_the_operator(lab: Any) -> None:
    pool = await started(lab, body())
    lab.cluster.kubelet = Slow()
    await pool.last(10, waiting=16)
    for name in pool.nodes:
        lab.cluster.set_status(Ref("Pod", "lab", name), READY)
    await pool.last(4, waiting=16)
    told = pool.status.provision
    assert told.samples >= 3
    await lab.kill()
    await lab.settle()
    sizer = lab.reconciler.kinds["EnvPool"].sizers.get(
        EnvPool.model_validate(lab.cluster.objects()[KEY])
    )
    assert f"{sizer.provisions.estimate.p50_s:.1f}" == told.p50_seconds
    assert pool.status.provision == told, "or the one after this would know nothing"


READY = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}


class Slow:
    """Pods take their time."""

    def start(self, cluster: Any, pod: Any) -> None:
        metadata = pod["metadata"]
        cluster.set_status(Ref("Pod", "lab", metadata["name"]), {"phase": "Pending"})

    def stop(self, cluster: Any, pod: Any) -> None:
        cluster.purge(Ref("Pod", "lab", pod["metadata"]["name"]))


async def test_people_who_scale_down_wait_for_leases_too(lab: Any) -> None:
    pool = await started(lab, manual(3))
    held = dict.fromkeys(pool.nodes, 1)
    await pool.say(held)
    lab.cluster.upsert(manual(1))
    await lab.settle()
    assert len(pool.nodes) == 3
    assert (pool.status.phase, pool.status.draining) == ("Draining", 2)
    assert lab.peers.drained[BROKER] == {"repos-node-1", "repos-node-2"}
    del held["repos-node-1"]
    await pool.last(2, held)
    assert pool.nodes == ["repos-node-0", "repos-node-2"]


async def test_hosts_that_are_wanted_again_get_environments_again(lab: Any) -> None:
    pool = await started(lab, manual(2))
    held = dict.fromkeys(pool.nodes, 1)
    await pool.say(held)
    lab.cluster.upsert(manual(1))
    await lab.settle()
    assert lab.peers.drained[BROKER] == {"repos-node-1"}
    lab.cluster.upsert(manual(2))
    vacating = environments_pb2.NodeFigures(node_id="repos-node-1", held=1, vacating=True)
    said = environments_pb2.WatchPoolResponse(told_unix_ms=pool.now_ms, members=[vacating])
    lab.peers.pools[BROKER].append(said)
    await lab.settle()
    await lab.advance(2)
    assert lab.peers.drained[BROKER] == frozenset()


@pytest.mark.parametrize("mode", ["Reactive", "External"])
async def test_a_runs_own_pool_is_released_with_the_run_and_comes_back(
    lab: Any, run_body: Any, mode: str
) -> None:
    run = run_body()
    template = run["spec"]["roles"]["environments"][0]["poolTemplate"]
    template.pop("replicas")
    template |= {"maxReplicas": 4, "autoscaling": {"mode": mode}}
    lab.cluster.upsert(run)
    await lab.settle()
    key = Ref("EnvPool", "lab", "demo-repos")
    assert lab.cluster.objects()[key]["spec"]["autoscaling"] == {"mode": mode, "schedule": []}
    lab.cluster.upsert({**run, "spec": {**run["spec"], "suspend": True}})
    for _ in range(200):
        await lab.advance(10)
    spec = lab.cluster.objects()[key]["spec"]
    assert (spec["replicas"], "autoscaling" in spec) == (0, False)
    assert [name for name in lab.names("Pod") if name.startswith("demo-repos")] == []
    lab.cluster.upsert({**run, "spec": {**run["spec"], "suspend": False}})
    await lab.settle()
    spec = lab.cluster.objects()[key]["spec"]
    assert ("replicas" in spec, spec["autoscaling"]["mode"]) == (False, mode)
