"""The broker of one pool: grants leases, orders environments from hosts, ends expired leases."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from blake3 import blake3

from etude.common.api.pool.spec import EnvPoolSpec
from etude.common.errors import FullError, ReusedIdError, UnavailableError
from etude.common.pinned_images import pinned_digest
from etude.common.plans.registry import PlanRegistry
from etude.common.pools.broker_shards import shard_label
from etude.envserver import metrics
from etude.envserver.broker import pool_statistics
from etude.envserver.broker.classes.preemptor import Preemptor
from etude.envserver.broker.classes.queues import ClassQueues, class_rules
from etude.envserver.broker.classes.shares import ClassShares
from etude.envserver.broker.dispatcher import Dispatcher
from etude.envserver.broker.host_client import HostClient
from etude.envserver.broker.hosts import HostDrains, HostState
from etude.envserver.broker.image_targets import ImageTargets
from etude.envserver.broker.launch_admission import (
    MAX_TTL_S,
    BrokerLoad,
    GrantRate,
    check_group_request,
    check_launch,
    refuse_excess,
    with_image_template,
)
from etude.envserver.broker.launch_orders import (
    LaunchOrder,
    failure_of,
    failure_outcome,
    success_outcome,
)
from etude.envserver.broker.launch_queue import WHOLE_BATCH, BatchKey, BatchPart, LaunchBatch, Turn
from etude.envserver.broker.lease_ledger import GrantedLease, LeaseLedger
from etude.envserver.broker.outcome_streams import OutcomeStream, OutcomeStreams, deliver_adopted
from etude.envserver.broker.placement import GroupPlacer, PlacementRequest
from etude.envserver.broker.pool_statistics import PoolStatistics, StartRecords
from etude.envserver.broker.snapshot_search import SNAPSHOT_S, find_snapshot
from etude.envserver.broker.warm_targets import WarmTargets, ready_by
from etude.v1 import environments_pb2, plan_pb2

log = logging.getLogger(__name__)

REBUILD_S = 2.0
"""A broker that starts hears every living host within this; nothing is granted before."""
CLOSE_WAIT_S = 2.0
"""A release answers after this, whatever its hosts do; their heartbeats bring the rest."""
TICK_S = 0.25
MOVING_S = 15.0
"""A host that has moved to another broker is known there after this."""
ADOPTED_S = 60
"""Shortest life of a lease that a new broker adopts; holders renew every 15 s."""


@dataclass(slots=True)
class Broker:
    """One pool's leases. State is in memory only: the hosts hold the truth."""

    spec: EnvPoolSpec
    host_client: HostClient
    name: str = ""
    """Of the pool."""
    shard: str = "broker"
    """Name of this broker among the pool's."""
    held_elsewhere: Callable[[str], int] = field(default=lambda _run_id: 0)
    """Environments that a run holds or waits for at the pool's other brokers."""
    started_s: float = field(default_factory=time.monotonic)
    ledger: LeaseLedger = field(default_factory=LeaseLedger)
    queue: ClassQueues = field(init=False)
    grant_rate: GrantRate = field(default_factory=GrantRate)
    streams: OutcomeStreams = field(default_factory=OutcomeStreams)
    placer: GroupPlacer = field(init=False)
    warm_targets: WarmTargets = field(init=False)
    image_targets: ImageTargets = field(init=False)
    drains: HostDrains = field(init=False)
    dispatcher: Dispatcher = field(init=False)
    preemptor: Preemptor = field(init=False)
    statistics: PoolStatistics = field(default_factory=PoolStatistics)
    starts: StartRecords = field(init=False)
    _templates: frozenset[str] = field(init=False)
    _label: str = field(init=False)

    def __post_init__(self) -> None:
        self._label = shard_label(self.shard)
        shares = ClassShares(class_rules(self.spec.lease.classes))
        self.queue = ClassQueues(shares, self.ledger.slots.by_class)
        self._templates = frozenset(template.name for template in self.spec.templates)
        self.placer = GroupPlacer(self.ledger.hosts, packs=self.spec.is_sized_for_demand)
        self.drains = HostDrains(self.ledger.hosts)
        self.warm_targets = WarmTargets(PlanRegistry(self._templates, self.name))
        self.image_targets = ImageTargets(self.warm_targets.plans, self.ledger.hosts)
        self.starts = StartRecords(self.ledger.hosts, self.statistics, self.warm_targets)
        self.dispatcher = Dispatcher(
            host_client=self.host_client,
            ledger=self.ledger,
            queue=self.queue,
            streams=self.streams,
            grant=self._grant,
            on_capacity=self._dispatch,
        )
        self.preemptor = Preemptor(
            host_client=self.host_client,
            ledger=self.ledger,
            queue=self.queue,
            spawn=self.dispatcher.spawn,
            on_change=self._place_waiting,
        )

    async def launch(
        self,
        request: environments_pb2.LaunchBatchRequest,
        elsewhere: Mapping[int, environments_pb2.HeldLease] = MappingProxyType({}),
        part: BatchPart = WHOLE_BATCH,
    ) -> AsyncGenerator[environments_pb2.LaunchBatchResponse, None]:
        """Outcomes of one batch as they arrive; the same request again gets the same leases.

        Other brokers may have some of its leases elsewhere, or ask for a part of it.

        Raises:
            InvalidFieldError: the request cannot be served as it is.
            UnknownIdError: no host holds such a snapshot of this run.
            ReusedIdError: the key came with another request.
            FullError: too many wait already.
        """
        check_launch(request, self._templates, self.spec.lease)
        asked, request = request.template, with_image_template(request, self.spec)
        if request.snapshot_id:
            until_s = max(time.monotonic(), self.started_s + REBUILD_S) + SNAPSHOT_S
            await find_snapshot(self.ledger.hosts, request, until_s=until_s)
        stream = self._submit(request, asked, elsewhere, part)
        stream.readers += 1
        try:
            async for outcome in stream.follow():
                yield outcome
        finally:
            # Without a reader, what still waits would be granted in vain. Leases stay for their
            # time, and the same request finds them again.
            if self.streams.remove_reader(stream):
                self.queue.remove(stream.batch)

    def renew(self, lease_ids: Sequence[str], ttl_s: int) -> list[str]:
        """Push the ends of leases; returns those that are gone.

        Raises:
            UnavailableError: this broker has not heard all hosts yet.
        """
        if any(each not in self.ledger.leases for each in lease_ids):
            self.require_rebuilt()
        expires = _unix_ms() + 1000 * self._ttl_s(ttl_s)
        return self.ledger.renew(lease_ids, expires_unix_ms=expires, now_s=time.monotonic())

    def held_by_run(self, run_id: str) -> int:
        """Environments that a run holds or waits for at this broker."""
        return self.ledger.of_run(run_id) + self.streams.num_missing(run_id)

    async def release(self, lease_ids: Sequence[str]) -> None:
        """End leases, give their slots to waiting launches, and wait a little for their hosts."""
        closing = self.dispatcher.close(self.ledger.end(lease_ids, now_s=time.monotonic()))
        if closing:
            await asyncio.wait(closing, timeout=CLOSE_WAIT_S)

    def heartbeat(
        self, request: environments_pb2.HeartbeatRequest
    ) -> environments_pb2.HeartbeatResponse:
        """Take in a host's heartbeat, and answer with the leases to end."""
        if request.moved_to:
            if request.moved_to != self.shard:  # else it was known by another address
                self.ledger.move_host(request)
            return environments_pb2.HeartbeatResponse(generation=request.generation)
        # Holders could not renew while there was no broker.
        answer = self.ledger.heartbeat(
            request,
            now_s=time.monotonic(),
            adopted_until_unix_ms=_unix_ms() + 1000 * ADOPTED_S,
        )
        host = self.ledger.hosts.get(request.node_id)
        if host is None or answer.generation != request.generation:
            return answer  # it was not taken in
        self.drains.update_host(host, now_s=time.monotonic())
        for beginning in request.begun:
            self.starts.record_beginning(request.node_id, beginning, self._templates)
        answer.warm.extend(self.warm_targets.targets_of(request.node_id))
        answer.images.extend(self.image_targets.targets_of(request.node_id))
        self._dispatch(host)
        return answer

    def report_plan(
        self, run_id: str, plan: plan_pb2.RolloutPlan
    ) -> list[environments_pb2.TemplateReady]:
        """Record the plan of a run; returns how soon it could have each template.

        Raises:
            InvalidFieldError: the plan names what this pool does not have.
        """
        self.warm_targets.plans.report(run_id, plan, now_s=time.monotonic())
        known = {wave.template: None for wave in plan.waves if wave.template in self._templates}
        return ready_by(self.ledger.hosts, known, now_unix_ms=_unix_ms())

    def drain_hosts(self, node_ids: Sequence[str], *, hold_s: float) -> list[str]:
        """Drain these hosts: they get no environments; returns those that hold none.

        Raises:
            UnavailableError: this broker has not heard all hosts yet.
        """
        self.require_rebuilt()
        now_s = time.monotonic()
        empty = self.drains.start_drain(node_ids, hold_s=hold_s, now_s=now_s)
        # A silent host may be on its way to another broker, with its leases.
        moving = {each.node_id for each in self.ledger.lost_since(now_s - MOVING_S)}
        return [name for name in empty if name not in moving]

    def prepare(self, request: environments_pb2.PrepareGroupRequest) -> None:
        """Choose a group's host, and have one environment ready there.

        Raises:
            InvalidFieldError: the group could not be launched like that.
        """
        check_group_request(request, self._templates)
        image = pinned_digest(request.image)
        want = PlacementRequest(request.template, request.count, image=image)
        host = self.placer.prepare(request.run_id, request.group_id, want)
        if host is not None:
            self.warm_targets.pin(request, host, now_s=time.monotonic())

    def replace_spec(self, spec: EnvPoolSpec) -> None:
        """Serve by a newer spec of the pool from now on; leases that are granted go on."""
        self.spec = spec
        self._templates = frozenset(template.name for template in spec.templates)
        self.placer.packs = spec.is_sized_for_demand
        self.queue.shares.rules = class_rules(spec.lease.classes)
        self.warm_targets.plans.templates = self._templates

    async def run(self, stop: asyncio.Event) -> None:
        """Expire leases and refresh targets until told to stop."""
        while not stop.is_set():
            await self.tick()
            try:
                async with asyncio.timeout(TICK_S):
                    await stop.wait()
            except TimeoutError:
                continue
        await self.dispatcher.stop()

    async def tick(self) -> None:
        """Make one pass over hosts, leases and the queue."""
        now_s = time.monotonic()
        for node_id in self.ledger.remove_silent_hosts(now_s=now_s):
            log.warning("host %s is lost: three heartbeats missed", node_id)
        over = self.ledger.expire(now_unix_ms=_unix_ms(), now_s=now_s)
        for closing in over:
            log.info("expired on %s: %s", closing.node_id, closing.lease_ids)
        self.dispatcher.close(over)
        for batch in list(self.queue.batches()):
            if (failure := failure_of(batch, self.ledger.hosts, now_s=now_s)) is not None:
                for index in self.queue.remove(batch):
                    self.streams.deliver(batch, failure_outcome(index, *failure))
        self.ledger.forget_old(now_s=now_s)
        self.drains.update(now_s=now_s)
        self.queue.record_use(now_s=now_s)
        self._place_waiting()
        self.preemptor.rotate(now_s=now_s)
        self.warm_targets.refresh(self.ledger.hosts, now_s=now_s)
        self.image_targets.refresh(now_s=now_s)
        self.statistics.lease_s.extend(self.ledger.lasted_s)
        self.ledger.lasted_s.clear()
        pool_statistics.record_pool(self.queue, self.ledger, now_s=now_s)

    @property
    def _is_rebuilt(self) -> bool:
        """True once every host had the time to report its leases."""
        return time.monotonic() - self.started_s > REBUILD_S

    def require_rebuilt(self) -> None:
        """Refuse an answer about unknown leases until every host had the time to report its own.

        Raises:
            UnavailableError: this broker has just started.
        """
        if not self._is_rebuilt:
            raise UnavailableError(
                "this broker has just started and does not know all leases yet: try again in 2 s"
            )

    def _submit(
        self,
        request: environments_pb2.LaunchBatchRequest,
        asked: str,
        elsewhere: Mapping[int, environments_pb2.HeldLease],
        part: BatchPart,
    ) -> OutcomeStream:
        key = BatchKey(request.run_id, request.idempotency_key)
        digest = blake3(request.SerializeToString(deterministic=True)).hexdigest(length=16)
        living = self.ledger.of_batch(key)
        present = self.streams.get(key)
        held = [*(granted.held for granted in living.values()), *elsewhere.values()]
        digests = {each.request_digest for each in held}
        if (digests | ({present.batch.digest} if present else set())) - {digest}:
            raise ReusedIdError(f"idempotency_key {key.idempotency_key!r} was another request")
        if present is not None:
            return present
        now_s = time.monotonic()
        indices = part.indices or range(request.count)
        # Before every host was heard, another lease of the same request may turn up.
        known = {i: each for i, each in living.items() if each.is_claimed or self._is_rebuilt}
        wanted = deque(i for i in indices if i not in known and i not in elsewhere)
        num_new = len(indices) - len(living.keys() & set(indices))
        with metrics.refusals.count_exceptions(FullError):
            load = self._load(request.run_id, num_new)
            refuse_excess(load, self.spec.lease, self.grant_rate, now_s=now_s)
        timeout_s = request.queue_timeout_seconds or self.spec.lease.queue_timeout_seconds
        deadline_s = now_s + (part.wait_s or timeout_s)
        batch = LaunchBatch(key, request, digest, now_s, deadline_s, wanted, size=len(indices))
        if request.deadline_unix_ms:
            batch.due_s = now_s + (request.deadline_unix_ms - _unix_ms()) / 1000
        for index, granted in sorted(known.items()):
            granted.is_claimed = True
            if index in indices:
                batch.outcomes[index] = success_outcome(index, granted.lease)
        for index, other in sorted(elsewhere.items()):
            batch.outcomes.setdefault(index, success_outcome(index, other.lease))
        stream = self.streams.open(batch)
        self.queue.add(batch)
        # Plans speak of the template that the run names, whatever image a task needs.
        self.warm_targets.record_launch(request, asked, num_new)
        self._place_waiting()
        return stream

    def _load(self, run_id: str, wanted: int) -> BrokerLoad:
        is_nearly_full = len(self.queue) + wanted > self.spec.lease.max_queue
        return BrokerLoad(
            wanted=wanted,
            waiting=len(self.queue),
            # Counted over every host only when the queue is nearly full.
            free=self.ledger.num_free if is_nearly_full else 0,
            batches=len(self.streams),
            held_by_run=self.held_by_run(run_id) + self.held_elsewhere(run_id),
        )

    def _ttl_s(self, ttl_s: int) -> int:
        return min(ttl_s or self.spec.lease.ttl_seconds, MAX_TTL_S)

    def _dispatch(self, changed: HostState | None = None) -> None:
        """Give adopted leases to their requests, and free slots to launches whose turn it is.

        Only the changed host, if there is one, can have free slots since the last call.
        """
        if not self._is_rebuilt:
            return
        deliver_adopted(self.ledger, self.streams, self.queue)
        hosts = self.ledger.hosts if changed is None else (changed,)
        is_wanted = len(self.queue) or self.ledger.slots.num_preempted
        # A look at every host for each heartbeat of a full pool would grow with their square.
        if not is_wanted or not any(host.free for host in hosts):
            return
        now_s = time.monotonic()
        spare = self.preemptor.num_spare(now_s=now_s)
        if self.ledger.slots.num_preempted:
            # After the floors, what was paused for them goes on first.
            self._open(self.queue.take(self.placer.offer, now_s=now_s, spare=0))
            spare -= self.preemptor.resume(hosts, spare=spare, now_s=now_s)
        self._open(self.queue.take(self.placer.offer, now_s=now_s, spare=spare))

    def _place_waiting(self, changed: HostState | None = None) -> None:
        """Dispatch what waits, and preempt rollouts for what has or would have to wait."""
        self._dispatch(changed)
        if self._is_rebuilt:
            self.preemptor.preempt(now_s=time.monotonic())

    def _open(self, turns: Iterable[Turn]) -> None:
        self.dispatcher.open(turns, self.placer, self._label, self._end_unix_ms)

    def _end_unix_ms(self, batch: LaunchBatch) -> int:
        return _unix_ms() + 1000 * self._ttl_s(batch.request.ttl_seconds)

    def _grant(self, order: LaunchOrder, held: environments_pb2.HeldLease, now_s: float) -> None:
        waited_s = now_s - order.batch.submitted_s
        node_id, template = order.host.node_id, order.batch.placement_class.template
        granted = GrantedLease(held=held, node_id=node_id, granted_s=now_s, template=template)
        self.ledger.grant(granted)
        self.grant_rate.record_grants(1, now_s=now_s)
        self.statistics.record_grant(held.lease, waited_s=waited_s)
        pool_statistics.record_granted(held.lease.start, waited_s=waited_s)
        if not order.batch.placement_class.image:
            self.starts.record(node_id, template, held.lease.start, held.lease.start_ms)
        self.streams.deliver(order.batch, success_outcome(held.index, held.lease))


def _unix_ms() -> int:
    return round(1000 * time.time())
