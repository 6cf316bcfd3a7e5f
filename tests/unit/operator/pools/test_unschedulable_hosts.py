"""A pool that sizes itself and finds fewer nodes than it wants hosts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from typing_extensions import override

from etude.common.api.kinds import EnvPool
from etude.operator.kube.memory_cluster import InstantKubelet, MemoryCluster
from etude.operator.manifests import Manifest, Ref, is_true, ref
from etude.operator.names import ordinal
from etude.v1 import environments_pb2

KEY = Ref("EnvPool", "lab", "repos")
BROKER = "repos-broker-0.repos-broker:7020"
SLOTS = 4
UNPLACED = {"type": "PodScheduled", "status": "False", "message": "0/1 nodes are available"}
IDLE_SINCE_MS = 1_000_000

POOL: Manifest = {
    "apiVersion": "etude.dev/v1alpha1",
    "kind": "EnvPool",
    "metadata": {"name": "repos", "namespace": "lab"},
    "spec": {
        "templates": [{"name": "python"}],
        "slotsPerReplica": SLOTS,
        "maxReplicas": 20,
        "autoscaling": {"mode": "Reactive"},
    },
}


@dataclass
class Machines(InstantKubelet):
    """Some of the pool's nodes find a machine, the others wait for one."""

    taken_by: frozenset[int] = frozenset({0})
    """Ordinals of those that do."""
    is_slow: bool = False
    """Whether what has found one does not get ready."""

    @override
    def start(self, cluster: MemoryCluster, pod: Manifest) -> None:
        key = ref(pod)
        if "-node-" not in key.name or (ordinal(key.name) in self.taken_by and not self.is_slow):
            super().start(cluster, pod)
        else:
            is_placed = ordinal(key.name) in self.taken_by
            conditions = [] if is_placed else [UNPLACED]
            cluster.set_status(key, {"phase": "Pending", "conditions": conditions})


class Pool:
    """The pool, whose broker says what a test wants it to."""

    def __init__(self, lab: Any) -> None:
        self.lab = lab
        self.machines = lab.cluster.kubelet = Machines()

    @property
    def status(self) -> Any:
        return EnvPool.model_validate(self.lab.cluster.objects()[KEY]).status

    @property
    def pods(self) -> dict[str, Manifest]:
        found = self.lab.cluster.objects().items()
        return {key.name: m for key, m in found if key.kind == "Pod" and "-node-" in key.name}

    @property
    def ready(self) -> list[str]:
        return sorted(name for name, pod in self.pods.items() if is_true(pod, "Ready"))

    @property
    def unplaced(self) -> list[str]:
        return sorted(set(self.pods) - set(self.ready))

    def condition(self, kind: str) -> tuple[str, str]:
        found = next(c for c in self.status.conditions if c.type == kind)
        return found.status, found.reason

    async def last(
        self, seconds: int, held: Mapping[str, int] | None = None, *, waiting: int = 0
    ) -> None:
        """For so long the broker says that these nodes hold leases and so many wait."""
        for _ in range(seconds // 2):
            await self.lab.advance(2)
            self._say(held or {}, waiting)
            await self.lab.settle()

    def _say(self, held: Mapping[str, int], waiting: int) -> None:
        self.lab.peers.hosts_in_use = {name for name, count in held.items() if count}
        members = [
            environments_pb2.NodeFigures(
                node_id=name, held=held.get(name, 0), idle_since_unix_ms=IDLE_SINCE_MS, cached=True
            )
            for name in {*self.ready, *held}
        ]
        report = environments_pb2.WatchPoolResponse(
            told_unix_ms=IDLE_SINCE_MS + round(1000 * self.lab.clock.monotonic_s()),
            slots=SLOTS * len(members),
            leased=sum(held.values()),
            waiting=waiting,
            members=members,
        )
        self.lab.peers.pools[BROKER].append(report)


@pytest.fixture
async def pool(lab: Any) -> Pool:
    made = Pool(lab)
    lab.cluster.upsert(POOL)
    await lab.settle()
    await made.last(4)
    assert made.ready == ["repos-node-0"]
    return made


async def test_the_only_scheduled_host_stays_when_the_burst_is_over(pool: Pool) -> None:
    await pool.last(30, waiting=32)
    assert len(pool.unplaced) >= 7
    for _ in range(20):
        await pool.last(20)
        assert pool.ready == ["repos-node-0"]
    assert pool.condition("Available") == ("True", "NodesReady")


async def test_hosts_without_demand_do_not_wait_for_nodes(pool: Pool) -> None:
    await pool.last(30, waiting=32)
    # Panic ends a stable window after the burst, and a pool shrinks after the delay.
    await pool.last(60 + 6 + 120 + 10)
    assert pool.unplaced == []
    assert pool.status.desired == 1
    assert pool.condition("HardCapped") == ("False", "Healthy")


async def test_a_pool_whose_node_comes_back_serves_again(pool: Pool) -> None:
    await pool.last(30, waiting=32)
    await pool.last(240)
    pool.lab.cluster.purge(Ref("Pod", "lab", "repos-node-0"))
    await pool.last(30, waiting=1)
    assert len(pool.ready) == 1


async def test_hosts_that_wait_for_a_node_go_before_those_that_have_one(pool: Pool) -> None:
    pool.machines.taken_by, pool.machines.is_slow = frozenset({6, 7}), True
    await pool.last(30, waiting=32)
    assert len(pool.pods) >= 10
    pool.lab.cluster.upsert({**POOL, "spec": {**POOL["spec"], "minIdle": 3 * SLOTS}})
    await pool.last(60 + 6 + 120 + 10)
    assert sorted(pool.pods) == ["repos-node-0", "repos-node-6", "repos-node-7"]


async def test_a_host_that_is_not_ready_and_holds_a_lease_is_no_surplus(pool: Pool) -> None:
    pool.machines.taken_by = frozenset({0, 1, 2})
    await pool.last(30, waiting=8)
    lost = pool.ready[2]
    pool.lab.cluster.set_status(Ref("Pod", "lab", lost), {"phase": "Running"})
    for _ in range(30):
        await pool.last(10, {lost: 1})
        assert lost not in pool.lab.peers.drained.get(BROKER, ())
    assert (len(pool.ready), pool.unplaced) == (1, [lost])
