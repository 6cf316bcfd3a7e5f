"""Grants leases: takes turns from the queue, orders environments, ends what is over."""

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from blake3 import blake3

from etude.agent.toolsets import toolset
from etude.common.api.pool import EnvPoolSpec
from etude.common.errors import FullError, InvalidFieldError, ReusedIdError
from etude.envserver import metrics
from etude.envserver.broker.ledger import Closing, Granted, Ledger, NodeState
from etude.envserver.broker.nodes import NodeError, Nodes
from etude.envserver.broker.placement import placement
from etude.envserver.broker.queue import Batch, BatchKey, Queue, Turn
from etude.v1 import environments_pb2

log = logging.getLogger(__name__)

REBUILD_S = 3.0
"""A broker that starts hears every living node within this; nothing is granted before."""
CLOSE_WAIT_S = 2.0
"""A release answers after this, whatever its nodes do; their heartbeats bring the rest."""
TICK_S = 0.25
ADOPTED_S = 60
"""Shortest life of a lease that a new broker finds; holders renew every 15 s."""
MAX_COUNT = 1024
MAX_TTL_S = 86_400
MAX_TRIES = 3
"""Nodes that may fail an environment before its client hears of it."""
RETRY_AFTER_S = 2.0


@dataclass(slots=True)
class Broker:
    """One pool's leases. State is in memory only: nodes are the truth."""

    spec: EnvPoolSpec
    nodes: Nodes
    started_s: float = field(default_factory=time.monotonic)
    ledger: Ledger = field(default_factory=Ledger)
    queue: Queue = field(default_factory=Queue)
    acquired_ms: deque[int] = field(default_factory=lambda: deque(maxlen=1000))
    """Time from request to lease of the newest grants."""
    _batches: dict[BatchKey, Batch] = field(default_factory=dict)
    _news: dict[BatchKey, asyncio.Event] = field(default_factory=dict)
    _readers: dict[BatchKey, int] = field(default_factory=dict)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def launch(
        self, request: environments_pb2.LaunchBatchRequest
    ) -> AsyncGenerator[environments_pb2.LaunchBatchResponse, None]:
        """Outcomes of one batch as they arrive; the same request again gets the same leases.

        Raises:
            InvalidFieldError: the request cannot be served as it is.
            ReusedIdError: the key came with another request.
            FullError: too many wait already.
        """
        batch = self._submit(request)
        self._readers[batch.key] = self._readers.get(batch.key, 0) + 1
        sent = 0
        try:
            while sent < request.count:
                news = self._news.setdefault(batch.key, asyncio.Event())
                for outcome in list(batch.outcomes.values())[sent:]:
                    sent += 1
                    yield outcome
                if sent < request.count:
                    await news.wait()
        finally:
            self._leave(batch)

    def renew(self, lease_ids: Sequence[str], ttl_s: int) -> list[str]:
        """Push the ends of leases; returns those that are gone."""
        expires = _unix_ms() + 1000 * self._ttl_s(ttl_s)
        return self.ledger.renew(lease_ids, expires_unix_ms=expires, now_s=time.monotonic())

    async def release(self, lease_ids: Sequence[str]) -> None:
        """End leases, give their slots to whoever waits, and wait a little for their nodes."""
        closing = self._end(lease_ids)
        if closing:
            await asyncio.wait(closing, timeout=CLOSE_WAIT_S)

    def heartbeat(
        self, request: environments_pb2.HeartbeatRequest
    ) -> environments_pb2.HeartbeatResponse:
        """Hear a node, and tell it what to end."""
        # Holders had nobody to renew with while there was no broker.
        answer = self.ledger.heartbeat(
            request,
            now_s=time.monotonic(),
            adopted_until_unix_ms=_unix_ms() + 1000 * ADOPTED_S,
        )
        self._dispatch()
        return answer

    async def run(self, stop: asyncio.Event) -> None:
        """End what is over, until told to stop."""
        while not stop.is_set():
            await self.tick()
            try:
                async with asyncio.timeout(TICK_S):
                    await stop.wait()
            except TimeoutError:
                continue
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def tick(self) -> None:
        """One pass over nodes, leases and the queue."""
        now_s = time.monotonic()
        for node_id in self.ledger.silent_nodes(now_s=now_s):
            log.warning("node %s is lost: three heartbeats missed", node_id)
        over = self.ledger.expired(now_unix_ms=_unix_ms())
        if over:
            log.info("expired: %s", over)
            self._end(over)
        for batch in [b for b in self.queue.batches() if b.deadline_s <= now_s]:
            for index in self.queue.remove(batch):
                self._arrive(batch, _failure(index, "QueueTimeout", "no slot became free in time"))
        self.ledger.forget(now_s=now_s)
        self._dispatch()

    def _submit(self, request: environments_pb2.LaunchBatchRequest) -> Batch:
        self._check(request)
        key = BatchKey(request.run_id, request.idempotency_key)
        digest = blake3(request.SerializeToString(deterministic=True)).hexdigest(length=16)
        living = self.ledger.of_batch(key)
        present = self._batches.get(key)
        digests = {granted.held.request_digest for granted in living.values()}
        digests |= {present.digest} if present else set()
        if digests - {digest}:
            raise ReusedIdError(f"idempotency_key {key.idempotency_key!r} was another request")
        if present is not None:
            return present
        wanted = [index for index in range(request.count) if index not in living]
        free = sum(self.ledger.free().values())
        if len(self.queue) + len(wanted) - free > self.spec.lease.max_queue:
            raise FullError(
                f"{len(self.queue)} environments wait already; this pool queues"
                f" {self.spec.lease.max_queue}",
                retry_after_s=RETRY_AFTER_S,
            )
        now_s = time.monotonic()
        timeout_s = request.queue_timeout_seconds or self.spec.lease.queue_timeout_seconds
        batch = Batch(key, request, digest, now_s, now_s + timeout_s, deque(wanted))
        for index, granted in sorted(living.items()):
            batch.outcomes[index] = _success(index, granted.lease)
        self._batches[key] = batch
        self.queue.add(batch)
        self._dispatch()
        return batch

    def _check(self, request: environments_pb2.LaunchBatchRequest) -> None:
        names = {template.name for template in self.spec.templates}
        rules = (
            ("run_id", bool(request.run_id), "is empty"),
            ("idempotency_key", bool(request.idempotency_key), "is empty"),
            ("template", request.template in names, f"is none of {', '.join(sorted(names))}"),
            ("count", 1 <= request.count <= MAX_COUNT, f"must be between 1 and {MAX_COUNT}"),
            ("ttl_seconds", request.ttl_seconds <= MAX_TTL_S, f"must be at most {MAX_TTL_S}"),
            (
                "workspace.uri",
                request.workspace.uri.startswith(("file://", "s3://")),
                "must be a file:// or s3:// URI",
            ),
        )
        for name, holds, what in rules:
            if not holds:
                raise InvalidFieldError(name, what)
        toolset(request.toolset)

    def _ttl_s(self, ttl_s: int) -> int:
        return min(ttl_s or self.spec.lease.ttl_seconds, MAX_TTL_S)

    def _leave(self, batch: Batch) -> None:
        self._readers[batch.key] -= 1
        if self._readers[batch.key] > 0:
            return
        del self._readers[batch.key]
        # Nobody listens: what still waits would be granted to nobody. Leases stay for their time,
        # and the same request finds them again.
        self.queue.remove(batch)
        self._batches.pop(batch.key, None)
        self._news.pop(batch.key, None)

    def _arrive(self, batch: Batch, outcome: environments_pb2.LaunchBatchResponse) -> None:
        batch.outcomes[outcome.index] = outcome
        news = self._news.pop(batch.key, None)
        if news is not None:
            news.set()

    def _dispatch(self) -> None:
        """Give free slots to whoever's turn it is."""
        metrics.queue_depth.set(len(self.queue))
        metrics.leases.set(len(self.ledger.leases))
        metrics.nodes.set(len(self.ledger.nodes))
        is_rebuilt = time.monotonic() - self.started_s > REBUILD_S
        if not is_rebuilt and len(self.ledger.nodes) < max(1, self.spec.replicas):
            return
        free = self.ledger.free()
        turns = [turn for turn in self.queue.take(sum(free.values())) if not self._is_held(turn)]
        for node_id, count in placement(len(turns), free).items():
            mine, turns = turns[:count], turns[count:]
            node = self.ledger.nodes[node_id]
            node.opening += count
            for batch in dict.fromkeys(turn.batch for turn in mine):
                order = _Order(node, batch, [turn.position for turn in mine if turn.batch is batch])
                self._spawn(self._open(order), f"open on {node_id}")

    def _end(self, lease_ids: Sequence[str]) -> list[asyncio.Task[None]]:
        closing = self.ledger.end(lease_ids, now_s=time.monotonic())
        return [self._spawn(self._close(each), f"close on {each.endpoint}") for each in closing]

    def _spawn(self, work: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _is_held(self, turn: Turn) -> bool:
        """A heartbeat brought the lease while its repeated request waited for the first one."""
        granted = self.ledger.of_batch(turn.batch.key).get(turn.position)
        if granted is None:
            return False
        if granted.held.request_digest == turn.batch.digest:
            self._arrive(turn.batch, _success(turn.position, granted.lease))
        else:
            reused = "the idempotency key was another request"
            self._arrive(turn.batch, _failure(turn.position, ReusedIdError.reason, reused))
        return True

    async def _open(self, order: "_Order") -> None:
        leases = [self._new_lease(order.batch, index) for index in order.indices]
        request = environments_pb2.OpenEnvironmentsRequest(
            leases=leases,
            template=order.batch.request.template,
            workspace=order.batch.request.workspace,
            toolset=order.batch.request.toolset,
        )
        queued_ms = round(1000 * (time.monotonic() - order.batch.submitted_s))
        try:
            outcomes = await self._answers(order, request)
        except NodeError as error:
            order.node.is_suspect = True
            ids = [held.lease.lease_id for held in leases]
            self.ledger.abandon(ids, order.node.node_id, now_s=time.monotonic())
            for index in order.indices:
                self._try_again(Turn(order.batch, index), str(error))
        else:
            for held, outcome in zip(leases, outcomes, strict=True):
                self._take(order, held, outcome, queued_ms)
        finally:
            order.node.opening -= len(order.indices)
        self._dispatch()

    async def _answers(
        self, order: "_Order", request: environments_pb2.OpenEnvironmentsRequest
    ) -> Sequence[environments_pb2.LaunchBatchResponse]:
        outcomes = await self.nodes.open(order.node.endpoint, request)
        if order.node.node_id not in self.ledger.nodes:
            raise NodeError(f"{order.node.endpoint}: lost while it opened environments")
        return outcomes

    def _new_lease(self, batch: Batch, index: int) -> environments_pb2.HeldLease:
        lease = environments_pb2.Lease(
            lease_id=f"{batch.digest[:12]}-{index}-{secrets.token_hex(4)}",
            agent_token=secrets.token_urlsafe(16),
            control_token=secrets.token_urlsafe(16),
            expires_unix_ms=_unix_ms() + 1000 * self._ttl_s(batch.request.ttl_seconds),
        )
        return environments_pb2.HeldLease(
            lease=lease,
            idempotency_key=batch.key.idempotency_key,
            index=index,
            run_id=batch.key.run_id,
            request_digest=batch.digest,
        )

    def _take(
        self,
        order: "_Order",
        held: environments_pb2.HeldLease,
        outcome: environments_pb2.LaunchBatchResponse,
        queued_ms: int,
    ) -> None:
        if outcome.HasField("lease"):
            held.lease.CopyFrom(outcome.lease)
            held.lease.queued_ms = queued_ms
            now_s = time.monotonic()
            self.ledger.grant(Granted(held=held, node_id=order.node.node_id, granted_s=now_s))
            self.acquired_ms.append(round(1000 * (now_s - order.batch.submitted_s)))
            metrics.acquire_seconds.observe(now_s - order.batch.submitted_s)
            self._arrive(order.batch, _success(held.index, held.lease))
        elif outcome.failure.reason == "NoSlot":
            # The node knows better than the ledger; its next heartbeat tells.
            order.node.is_suspect = True
            self._wait_again(Turn(order.batch, held.index))
        else:
            metrics.errors.labels("start").inc()
            self._arrive(order.batch, outcome)

    def _try_again(self, turn: Turn, why: str) -> None:
        tries = turn.batch.tries.get(turn.position, 0) + 1
        turn.batch.tries[turn.position] = tries
        if tries < MAX_TRIES:
            self._wait_again(turn)
        else:
            metrics.errors.labels("start").inc()
            self._arrive(turn.batch, _failure(turn.position, NodeError.reason, why))

    def _wait_again(self, turn: Turn) -> None:
        if self._batches.get(turn.batch.key) is turn.batch:
            self.queue.put_back(turn)

    async def _close(self, closing: Closing) -> None:
        try:
            await self.nodes.close(closing.endpoint, closing.lease_ids)
        except NodeError as error:
            # The node's next heartbeat is answered with the same order.
            log.warning("%d leases not closed: %s", len(closing.lease_ids), error)
        else:
            self.ledger.gone(closing.lease_ids)
            self._dispatch()


class _Order(NamedTuple):
    """Environments of one batch for one node."""

    node: NodeState
    batch: Batch
    indices: list[int]


def _unix_ms() -> int:
    return round(1000 * time.time())


def _success(index: int, lease: environments_pb2.Lease) -> environments_pb2.LaunchBatchResponse:
    return environments_pb2.LaunchBatchResponse(index=index, lease=lease)


def _failure(index: int, reason: str, message: str) -> environments_pb2.LaunchBatchResponse:
    failure = environments_pb2.LaunchFailure(reason=reason, message=message)
    return environments_pb2.LaunchBatchResponse(index=index, failure=failure)
