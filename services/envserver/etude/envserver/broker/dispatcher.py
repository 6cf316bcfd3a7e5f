"""Dispatcher of launch orders: sends them to hosts and delivers the outcomes; retries failures."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field

from etude.envserver import metrics
from etude.envserver.broker.host_client import NodeError, Nodes
from etude.envserver.broker.hosts import NodeState
from etude.envserver.broker.launch_orders import Order, failure
from etude.envserver.broker.launch_queue import Queue, Turn
from etude.envserver.broker.lease_ledger import Closing, Ledger
from etude.envserver.broker.outcome_streams import Streams
from etude.v1 import environments_pb2

log = logging.getLogger(__name__)

MAX_TRIES = 3
"""Hosts that may fail an environment before its client hears of it."""


@dataclass(slots=True, kw_only=True)
class Carrier:
    """The orders in flight between a broker and its hosts."""

    nodes: Nodes
    ledger: Ledger
    queue: Queue
    streams: Streams
    grant: Callable[[Order, environments_pb2.HeldLease, float], None]
    """Called with each lease that a host has opened, and when."""
    moved: Callable[[], None]
    """Called when slots may have become free."""
    _tasks: set[asyncio.Task[None]] = field(default_factory=set, init=False)

    def open(self, order: Order, expires_unix_ms: int) -> None:
        """Order environments from a host, under new leases with this end."""
        leases = order.leases(expires_unix_ms)
        self._spawn(self._open(order, leases), f"open on {order.node.node_id}")

    def close(self, closing: Sequence[Closing]) -> list[asyncio.Task[None]]:
        """Tell hosts which leases to end."""
        return [self._spawn(self._close(each), f"close on {each.node_id}") for each in closing]

    async def stop(self) -> None:
        """Cancel the orders in flight."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _spawn(self, work: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _open(self, order: Order, leases: Sequence[environments_pb2.HeldLease]) -> None:
        batch = order.batch
        queued_ms = round(1000 * (time.monotonic() - batch.submitted_s))
        try:
            outcomes = await self._answers(order, leases)
        except NodeError as error:
            order.node.is_suspect = True
            self.ledger.abandon([held.lease.lease_id for held in leases], now_s=time.monotonic())
            for turn in order.turns:
                self._try_again(turn, str(error))
        else:
            now_s = time.monotonic()
            for turn, held, outcome in zip(order.turns, leases, outcomes, strict=True):
                if outcome.HasField("lease"):
                    held.lease.CopyFrom(outcome.lease)
                    held.lease.queued_ms = queued_ms
                    self.grant(order, held, now_s)
                else:
                    self._refused(order.node, turn, outcome)
        finally:
            order.node.answered(len(order.turns), order.cpu_ms)
        self.moved()

    async def _answers(
        self, order: Order, leases: Sequence[environments_pb2.HeldLease]
    ) -> Sequence[environments_pb2.LaunchBatchResponse]:
        outcomes = await self.nodes.open(order.node.endpoint, order.request(leases))
        for held, outcome in zip(leases, outcomes, strict=True):
            if outcome.HasField("lease") and outcome.lease.lease_id != held.lease.lease_id:
                raise NodeError(f"{order.node.endpoint}: opened another lease than the one ordered")
        if self.ledger.nodes.get(order.node.node_id) is not order.node:
            raise NodeError(f"{order.node.endpoint}: lost while it opened environments")
        return outcomes

    def _refused(
        self, node: NodeState, turn: Turn, outcome: environments_pb2.LaunchBatchResponse
    ) -> None:
        if outcome.failure.reason == "NoSlot":
            # The node knows better than the ledger; its next heartbeat tells.
            node.is_suspect = True
            self._wait_again(turn)
        else:
            metrics.errors.labels("start").inc()
            self.streams.arrive(turn.batch, outcome)

    def _try_again(self, turn: Turn, why: str) -> None:
        tries = turn.batch.tries.get(turn.position, 0) + 1
        turn.batch.tries[turn.position] = tries
        if tries < MAX_TRIES:
            self._wait_again(turn)
        else:
            metrics.errors.labels("start").inc()
            self.streams.arrive(turn.batch, failure(turn.position, NodeError.reason, why))

    def _wait_again(self, turn: Turn) -> None:
        if self.streams.is_heard(turn.batch):
            self.queue.put_back(turn)

    async def _close(self, closing: Closing) -> None:
        try:
            await self.nodes.close(closing.endpoint, closing.lease_ids)
        except NodeError as error:
            # The node's next heartbeat is answered with the same order.
            log.warning("%d leases not closed: %s", len(closing.lease_ids), error)
        else:
            self.ledger.gone(closing.node_id, closing.lease_ids)
            self.moved()
