"""Episodes of a client whose environments may be lost, as a rollout worker drives them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from tests.support.environments.pool_client import Pool
from typing_extensions import override

from etude.agent.replay import CallLog
from etude.agent.toolsets import toolset
from etude.trainer.rollouts.failover import FailoverEnvironment, ReplacementSource
from etude.trainer.rollouts.leases import Leases
from etude.trainer.rollouts.outage import OutageBudget
from etude.trainer.rollouts.sandbox_client import SandboxClient
from etude.trainer.rollouts.snapshot_client import SnapshotClient
from etude.v1 import environments_pb2

OUTAGE_S = 60.0
DEADLINE_S = 60.0


@dataclass
class Episodes(ReplacementSource):
    """Episodes of one client of a pool."""

    pool: Pool
    leases: Leases
    outage: OutageBudget = field(default_factory=lambda: OutageBudget(OUTAGE_S))
    key: str = ""

    async def begin(self, key: str) -> FailoverEnvironment:
        self.key = key
        request = self.pool.request(key)
        [launch] = [each async for each in self.leases.launch(request)]
        assert launch.lease is not None, launch.failure
        log = CallLog(toolset(self.pool.toolset).tools)
        present = self.environment(launch.lease)
        return FailoverEnvironment(self.leases, self, log, self.outage, present)

    @override
    def request(self, number: int) -> environments_pb2.LaunchBatchRequest:
        return self.pool.request(f"{self.key}/{number}")

    @override
    def environment(self, lease: environments_pb2.Lease) -> SandboxClient:
        return SandboxClient(
            self.pool.node(lease), lease, self.leases, self.outage, timeout_s=DEADLINE_S
        )

    @override
    def states(self, lease: environments_pb2.Lease) -> SnapshotClient:
        return SnapshotClient(self.pool.states(lease), lease, self.outage, DEADLINE_S)

    @override
    async def set_up(self, lease: environments_pb2.Lease) -> None:
        """Nothing: these tasks have no set-up."""


@contextlib.asynccontextmanager
async def episodes_of(pool: Pool) -> AsyncIterator[Episodes]:
    """Leases are renewed while the block runs, and given back."""
    leases = Leases(pool.broker, OUTAGE_S)
    keeper = asyncio.create_task(leases.keep_alive(), name="keep leases")
    try:
        yield Episodes(pool, leases)
    finally:
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)
        await leases.close()
