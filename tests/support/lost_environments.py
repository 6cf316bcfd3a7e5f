"""Episodes of a client whose environments may be lost, as a rollout worker drives them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from tests.support.pool_client import Pool
from typing_extensions import override

from etude.agent.replay import CallLog
from etude.agent.toolsets import toolset
from etude.trainer.rollouts.failover import RecoveringEnvironment, Replacing
from etude.trainer.rollouts.leases import Leases
from etude.trainer.rollouts.outage import Outage
from etude.trainer.rollouts.sandbox_client import LeasedEnvironment
from etude.trainer.rollouts.snapshot_client import LeaseStates
from etude.v1 import environments_pb2

OUTAGE_S = 60.0
DEADLINE_S = 60.0


@dataclass
class Episodes(Replacing):
    """Episodes of one client of a pool."""

    pool: Pool
    leases: Leases
    outage: Outage = field(default_factory=lambda: Outage(OUTAGE_S))
    key: str = ""

    async def begin(self, key: str) -> RecoveringEnvironment:
        self.key = key
        request = self.pool.request(key)
        [launch] = [each async for each in self.leases.launch(request)]
        assert launch.lease is not None, launch.failure
        log = CallLog(toolset(self.pool.toolset).tools)
        present = self.environment(launch.lease)
        return RecoveringEnvironment(self.leases, self, log, self.outage, present)

    @override
    def request(self, number: int) -> environments_pb2.LaunchBatchRequest:
        return self.pool.request(f"{self.key}/{number}")

    @override
    def environment(self, lease: environments_pb2.Lease) -> LeasedEnvironment:
        return LeasedEnvironment(
            self.pool.node(lease), lease, self.leases, self.outage, timeout_s=DEADLINE_S
        )

    @override
    def states(self, lease: environments_pb2.Lease) -> LeaseStates:
        return LeaseStates(self.pool.states(lease), lease, self.outage, DEADLINE_S)


@contextlib.asynccontextmanager
async def episodes_of(pool: Pool) -> AsyncIterator[Episodes]:
    """Leases are renewed while the block runs, and given back."""
    leases = Leases(pool.broker, OUTAGE_S)
    keeper = asyncio.create_task(leases.keep(), name="keep leases")
    try:
        yield Episodes(pool, leases)
    finally:
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)
        await leases.close()
