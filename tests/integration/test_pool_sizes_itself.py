"""A pool that sizes itself, with a real broker and real nodes as processes of this machine."""

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.support.environments.served_pools import greeting

from etude.common.api.kinds import EnvPool
from etude.common.rpc import channels
from etude.envserver.drivers.base import DriverUnavailableError
from etude.envserver.drivers.process.driver import ProcessDriver
from etude.operator.builders.platform import Platform
from etude.operator.clock import SystemClock
from etude.operator.controller.operator import open_operator
from etude.operator.controller.status_writer import StatusDebounce
from etude.operator.local.process_cluster import ProcessCluster, ProcessKubelet, process_cluster
from etude.operator.manifests import Manifest, Ref, is_deleting, is_true, labels
from etude.operator.remotes.clients import GrpcRemoteClient
from etude.v1 import environments_pb2, environments_pb2_grpc, plan_pb2

LIMIT_S = 240.0
"""Far above what each step takes: a node starts in seconds on an idle machine."""
KEY = Ref("EnvPool", "lab", "repos")
SLOTS = 2
POOL = {
    "apiVersion": "etude.dev/v1alpha1",
    "kind": "EnvPool",
    "metadata": {"name": "repos", "namespace": "lab"},
    "spec": {
        "templates": [{"name": "python", "trust": "Trusted"}],
        "isolation": {"minimum": "Process", "driver": "Process"},
        "slotsPerReplica": SLOTS,
        "maxReplicas": 4,
        "autoscaling": {
            "mode": "Predictive",
            "stableWindowSeconds": 10,
            "scaleDownDelaySeconds": 4,
            "scaleToZero": {"mode": "Never", "graceSeconds": 0},
        },
    },
}


@pytest.fixture
async def _process_driver(tmp_path: Path) -> None:
    made = ProcessDriver(tmp_path / "probe")
    (tmp_path / "probe").mkdir()
    try:
        await made.start()
    except DriverUnavailableError as error:
        pytest.skip(str(error))
    await made.stop()


@dataclass
class Pool:
    """The pool, and a client of its broker."""

    cluster: ProcessCluster
    source: str

    @property
    def status(self) -> Any:
        return EnvPool.model_validate(self.cluster.get(KEY)).status

    @property
    def nodes(self) -> list[Manifest]:
        """Those that nobody has asked to go."""
        pods = self.cluster.list_objects("Pod")
        nodes = (pod for pod in pods if labels(pod).get("etude.dev/role") == "node")
        return [node for node in nodes if not is_deleting(node)]

    @property
    def ready(self) -> list[str]:
        """Those of them that answer."""
        return [str(node["metadata"]["name"]) for node in self.nodes if is_true(node, "Ready")]

    def holder(self, lease: environments_pb2.Lease) -> str:
        """The node of a lease; it may take some before its first probe."""
        port = int(lease.endpoint.rpartition(":")[2])
        assert isinstance(self.cluster.kubelet, ProcessKubelet)
        book = self.cluster.kubelet.ports
        names = [str(node["metadata"]["name"]) for node in self.nodes]
        (found,) = [name for name in names if book.port(name, 7030) == port]
        return found

    @contextlib.asynccontextmanager
    async def broker(
        self,
    ) -> AsyncIterator["environments_pb2_grpc.EnvBrokerServiceAsyncStub"]:
        address = self.cluster.address("lab", "repos-broker-0.repos-broker:7020")
        async with channels.dial(address) as channel:
            yield environments_pb2_grpc.EnvBrokerServiceStub(channel)

    async def launch(self, key: str, count: int) -> list[environments_pb2.Lease]:
        """Environments, as soon as there are so many."""
        request = environments_pb2.LaunchBatchRequest(
            run_id="run",
            idempotency_key=key,
            template="python",
            workspace=environments_pb2.WorkspaceSource(uri=self.source),
            count=count,
            toolset="Compact",
            ttl_seconds=3600,
            queue_timeout_seconds=int(LIMIT_S),
        )
        async with self.broker() as broker:
            outcomes = [each async for each in broker.LaunchBatch(request, timeout=LIMIT_S)]
        assert all(each.HasField("lease") for each in outcomes), outcomes
        return [each.lease for each in outcomes]

    async def release(self, leases: list[environments_pb2.Lease]) -> None:
        ids = [lease.lease_id for lease in leases]
        async with self.broker() as broker:
            await broker.ReleaseLeases(environments_pb2.ReleaseLeasesRequest(lease_ids=ids))

    async def missing(self, lease: environments_pb2.Lease) -> list[str]:
        """The lease's id once it is gone."""
        request = environments_pb2.RenewLeasesRequest(lease_ids=[lease.lease_id], ttl_seconds=3600)
        async with self.broker() as broker:
            return list((await broker.RenewLeases(request)).missing_lease_ids)

    async def plan(self, count: int, *, in_s: float, valid_s: float) -> None:
        now_ms = round(1000 * time.time())
        plan = plan_pb2.RolloutPlan(
            version=now_ms,
            made_unix_ms=now_ms,
            valid_until_unix_ms=now_ms + round(1000 * valid_s),
            waves=[plan_pb2.Wave(template="python", count=count, start_s=in_s)],
        )
        async with self.broker() as broker:
            await broker.ReportPlan(environments_pb2.ReportPlanRequest(run_id="run", plan=plan))

    async def until(self, holds: Callable[[], object], what: str) -> None:
        try:
            async with asyncio.timeout(LIMIT_S):
                while not holds():  # noqa: ASYNC110 - the cluster is polled as a person would
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise AssertionError(f"never: {what}; {self.ready}, {self.status}") from None


@pytest.fixture
async def pool(tmp_path: Path, _process_driver: None) -> AsyncIterator[Pool]:
    source = greeting(tmp_path)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    platform = Platform(
        images=dict.fromkeys(("trainer", "inference", "rewards", "envserver", "operator"), "local"),
        has_shared_files=True,
        allows_weak_isolation=True,
    )
    async with ProcessKubelet(folder=tmp_path, base_env={"PATH": path}) as kubelet:
        cluster = process_cluster(kubelet)
        running = open_operator(
            cluster,
            GrpcRemoteClient(),
            platform,
            SystemClock(),
            instance="test",
            debounce=StatusDebounce(figures_s=0.5),
        )
        async with running as made:
            task = asyncio.create_task(made.run())
            cluster.upsert(POOL)
            found = Pool(cluster, source.as_uri())
            try:
                await found.until(lambda: found.ready, "the first node")
                yield found
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                kubelet.skip_grace()


@pytest.mark.timeout(5 * LIMIT_S)
async def test_a_pool_grows_for_demand_and_for_plans_and_gives_up_empty_hosts_only(
    pool: Pool,
) -> None:
    assert len(pool.ready) == 1
    leases = await pool.launch("wave", 5)
    assert len(pool.nodes) >= 3
    kept, rest = leases[-1], leases[:-1]
    holder = pool.holder(kept)
    await pool.release(rest)
    # A busy machine's node may be late for a probe, and is not ready for a moment.
    await pool.until(lambda: pool.ready == [holder], "the node in use is the only one left")
    assert await pool.missing(kept) == []
    await pool.plan(6, in_s=40, valid_s=3600)
    await pool.until(lambda: pool.status.autoscaler.mode == "Planned", "the plan asks for most")
    await pool.until(lambda: len(pool.ready) >= 3, "nodes before the wave")
    assert pool.status.slots.queued == 0
    assert await pool.missing(kept) == []
    await pool.plan(1, in_s=0, valid_s=1)
    await pool.until(lambda: len(pool.ready) == 1, "the plan is over")
    assert await pool.missing(kept) == []
    assert pool.status.provision.samples >= 3
