"""Routing broadcast: rollout workers see engines join and leave while rollouts are in flight."""

import asyncio
from dataclasses import dataclass, field

from etude.trainer.controller.publishing.engines import Engines
from etude.trainer.rollouts.protocol import RolloutWorkers
from etude.trainer.routing.table import RoutingTable

PERIOD_S = 0.5
"""Age that a worker's table may reach. Loads of other workers may be twice as old: they are
collected in one round and spread in the next."""


@dataclass(slots=True)
class RoutingBroadcast:
    """Sends the routing table to all workers: every change, and loads if there are several."""

    engines: Engines
    workers: RolloutWorkers
    period_s: float = PERIOD_S
    _sent: RoutingTable = field(default_factory=RoutingTable)

    async def run(self) -> None:
        """Send tables until cancelled."""
        while True:
            await self.send()
            await asyncio.sleep(self.period_s)

    async def send(self) -> None:
        """Send the table, if a worker can learn anything from it."""
        table = self.engines.routing_table()
        if table != self._sent or self.workers.num_workers > 1:
            await self.workers.update_routing(table)
            self._sent = table
