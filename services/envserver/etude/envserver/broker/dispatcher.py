"""Dispatcher of launch orders: sends them to hosts and delivers the outcomes; retries failures."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field

from etude.envserver import metrics
from etude.envserver.broker.classes.queues import ClassQueues
from etude.envserver.broker.host_client import HostCallError, HostClient
from etude.envserver.broker.hosts import Closing, HostState
from etude.envserver.broker.launch_orders import LaunchOrder, failure_outcome
from etude.envserver.broker.launch_queue import BatchKey, LaunchBatch, Turn
from etude.envserver.broker.lease_ledger import LeaseLedger
from etude.envserver.broker.outcome_streams import OutcomeStreams
from etude.envserver.broker.placement import GroupPlacer
from etude.envserver.read_grants.allowed_prefixes import OrderedWorkspaces
from etude.v1 import environments_pb2

log = logging.getLogger(__name__)

MAX_TRIES = 3
"""Hosts that may fail an environment before its client hears of it."""

IMAGE_WAIT_S = 1.0
"""Longest time until a host that pulls an image is asked again."""
LEAST_IMAGE_WAIT_S = 0.1
WAITED_SHARE = 0.25
"""Of the time that a launch has waited: a pull takes from a moment to minutes."""


@dataclass(slots=True, kw_only=True)
class Dispatcher:
    """The orders in flight between a broker and its hosts."""

    host_client: HostClient
    ledger: LeaseLedger
    queue: ClassQueues
    streams: OutcomeStreams
    grant: Callable[[LaunchOrder, environments_pb2.HeldLease, float], None]
    """Called with each lease that a host has opened, and when."""
    workspaces: OrderedWorkspaces = field(default_factory=OrderedWorkspaces)
    """Workspaces of orders, which hosts may read."""
    on_capacity: Callable[[HostState | None], None]
    """Called when slots of a host may have become free; without one, also when an order failed."""
    _tasks: set[asyncio.Task[None]] = field(default_factory=set, init=False)

    def open(
        self,
        turns: Iterable[Turn],
        placer: GroupPlacer,
        label: str,
        end_of: Callable[[LaunchBatch], int],
    ) -> None:
        """Order the environments whose turn it is from the hosts that were offered.

        Args:
            turns: of the queue.
            placer: that offered the hosts.
            label: of the broker, in the ids of its leases.
            end_of: end of a batch's new leases in Unix milliseconds.
        """
        orders: dict[tuple[str, BatchKey], LaunchOrder] = {}
        for turn in turns:
            host = placer.reserve(turn)
            if host is None:
                self.queue.settle(turn.batch, 1)
                continue
            key = (host.node_id, turn.batch.key)
            order = LaunchOrder(host=host, batch=turn.batch, label=label)
            orders.setdefault(key, order).turns.append(turn)
        now_s = time.monotonic()
        for order in orders.values():
            self.workspaces.record(order.batch.request.workspace.uri, now_s=now_s)
            leases = order.new_leases(end_of(order.batch))
            self.spawn(self._open(order, leases), f"open on {order.host.node_id}")

    def close(self, closing: Sequence[Closing]) -> list[asyncio.Task[None]]:
        """Tell hosts which leases to end."""
        return [self.spawn(self._close(each), f"close on {each.node_id}") for each in closing]

    async def stop(self) -> None:
        """Cancel the orders in flight."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def spawn(self, work: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
        """Start a task that ends with the broker."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _open(self, order: LaunchOrder, leases: Sequence[environments_pb2.HeldLease]) -> None:
        batch, freed = order.batch, None
        queued_ms = round(1000 * (time.monotonic() - batch.submitted_s))
        try:
            outcomes = await self._request_outcomes(order, leases)
        except HostCallError as error:
            order.host.is_suspect = True
            self.ledger.disown([held.lease.lease_id for held in leases], now_s=time.monotonic())
            for turn in order.turns:
                self._retry(turn, str(error))
        else:
            now_s = time.monotonic()
            if all(outcome.HasField("lease") for outcome in outcomes):
                freed = order.host
            for turn, held, outcome in zip(order.turns, leases, outcomes, strict=True):
                if outcome.HasField("lease"):
                    held.lease.CopyFrom(outcome.lease)
                    held.lease.queued_ms = queued_ms
                    self.grant(order, held, now_s)
                else:
                    self._handle_refusal(order.host, turn, outcome)
        finally:
            order.host.settle_order(len(order.turns), order.cpu_ms)
            self.queue.settle(batch, len(order.turns))
        self.on_capacity(freed)

    async def _request_outcomes(
        self, order: LaunchOrder, leases: Sequence[environments_pb2.HeldLease]
    ) -> Sequence[environments_pb2.LaunchBatchResponse]:
        outcomes = await self.host_client.open(order.host.endpoint, order.to_request(leases))
        for held, outcome in zip(leases, outcomes, strict=True):
            if outcome.HasField("lease") and outcome.lease.lease_id != held.lease.lease_id:
                raise HostCallError(
                    f"{order.host.endpoint}: opened another lease than the one ordered"
                )
        if self.ledger.hosts.get(order.host.node_id) is not order.host:
            raise HostCallError(f"{order.host.endpoint}: lost while it opened environments")
        return outcomes

    def _handle_refusal(
        self, host: HostState, turn: Turn, outcome: environments_pb2.LaunchBatchResponse
    ) -> None:
        if outcome.failure.reason == "NoSlot":
            # The host knows better than the ledger; its next heartbeat corrects it.
            host.is_suspect = True
            self._requeue(turn)
        elif outcome.failure.reason == "ImageNotReady":
            # It holds no slot meanwhile, and other launches go on.
            self.spawn(self._requeue_later(turn), "wait for an image")
        else:
            metrics.errors.labels("start").inc()
            self.streams.deliver(turn.batch, outcome)

    def _retry(self, turn: Turn, why: str) -> None:
        tries = turn.batch.tries.get(turn.position, 0) + 1
        turn.batch.tries[turn.position] = tries
        if tries < MAX_TRIES:
            self._requeue(turn)
        else:
            metrics.errors.labels("start").inc()
            self.streams.deliver(
                turn.batch, failure_outcome(turn.position, HostCallError.reason, why)
            )

    async def _requeue_later(self, turn: Turn) -> None:
        waited_s = time.monotonic() - turn.batch.submitted_s
        await asyncio.sleep(min(IMAGE_WAIT_S, max(LEAST_IMAGE_WAIT_S, WAITED_SHARE * waited_s)))
        self._requeue(turn)
        self.on_capacity(None)

    def _requeue(self, turn: Turn) -> None:
        if self.streams.has_reader(turn.batch):
            self.queue.requeue(turn)

    async def _close(self, closing: Closing) -> None:
        try:
            await self.host_client.close(closing.endpoint, closing.lease_ids)
        except HostCallError as error:
            # The host's next heartbeat is answered with the same order.
            log.warning("%d leases not closed: %s", len(closing.lease_ids), error)
        else:
            self.ledger.confirm_closed(closing.node_id, closing.lease_ids)
            self.on_capacity(self.ledger.hosts.get(closing.node_id))
