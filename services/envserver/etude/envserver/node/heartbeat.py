"""The node's side of its broker: a sign of life every second, orders back."""

import asyncio
import logging
import time
from dataclasses import dataclass, field

import grpc

from etude.envserver.node.node import Node
from etude.envserver.node.terms import ISOLATION
from etude.v1 import environments_pb2, environments_pb2_grpc

log = logging.getLogger(__name__)

INTERVAL_S = 1.0
DEADLINE_S = 2.0
"""A broker that needs longer is overloaded; three missed heartbeats lose the node."""


@dataclass(slots=True)
class Heartbeat:
    """Tells the broker what the node holds and does what the broker says."""

    node: Node
    broker: "environments_pb2_grpc.EnvBrokerServiceAsyncStub"
    node_id: str
    draining: bool = False
    _is_heard: bool = field(default=True, init=False)

    async def run(self, stop: asyncio.Event) -> None:
        """Beat until told to stop."""
        while not stop.is_set():
            await self.beat()
            # While no renewal can arrive, a lease that looks expired may be in use.
            if self._is_heard:
                expired = await self.node.expire(now_s=time.monotonic())
                log.log(logging.INFO if expired else logging.DEBUG, "expired: %s", expired)
            try:
                async with asyncio.timeout(INTERVAL_S):
                    await stop.wait()
            except TimeoutError:
                continue

    async def beat(self) -> None:
        """One heartbeat; a broker that does not answer changes nothing on this node."""
        request = environments_pb2.HeartbeatRequest(
            node_id=self.node_id,
            endpoint=self.node.endpoint,
            driver=self.node.driver.name,
            isolation=ISOLATION[self.node.driver.strength],
            slots=self.node.slots,
            held=self.node.held(),
            snapshots=self.node.states.snapshots.held(),
            draining=self.draining,
        )
        try:
            answer = await self.broker.Heartbeat(request, timeout=DEADLINE_S)
        except grpc.aio.AioRpcError as error:
            if self._is_heard:
                log.warning("the broker does not answer: %s", error.details())
            self._is_heard = False
            return
        self._is_heard = True
        self.node.renew(answer.renewed)
        await self.node.close(answer.close_lease_ids)
