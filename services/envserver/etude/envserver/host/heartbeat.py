"""Heartbeats of a host to its broker: leases and levels out, orders back, every second."""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field

import grpc

from etude.envserver.host import warm_minimum
from etude.envserver.host.broker_links import BrokerLinks
from etude.envserver.host.host import Host
from etude.envserver.host.leases.lease_changes import ConfirmedLeases, LeaseChanges
from etude.envserver.host.leases.lease_fields import ISOLATION
from etude.envserver.host.pool_following import PoolFollower
from etude.envserver.host.task_images import WantedImage
from etude.envserver.host.warm_minimum import NO_MINIMUM, WarmMinimum
from etude.v1 import environments_pb2, plan_pb2

log = logging.getLogger(__name__)

INTERVAL_S = 1.0
MIN_INTERVAL_S = 0.1
"""Between two heartbeats, of which the second one names a new snapshot."""
MAX_NEWS = 4_096
"""Starts that wait for a broker that does not answer; the oldest are forgotten first."""
UNHEARD_BEFORE_MOVE = 2
"""Heartbeats in a row after which a broker is given up for the next one."""
ERRAND_WAIT_S = 0.2
"""Most leases end sooner."""
DEADLINE_S = 2.0
"""A broker that needs longer is overloaded; after three missed heartbeats the host is lost."""


@dataclass(slots=True)
class HostHeartbeat:
    """Sends the state of a host's leases to its broker, and carries out the answers."""

    host: Host
    brokers: BrokerLinks
    node_id: str
    draining: bool = False
    minimum: WarmMinimum = NO_MINIMUM
    """Warm-pool bounds of the pool."""
    follower: PoolFollower | None = None
    """Follows the broker's spec of the pool; None for a host whose spec never changes."""
    _warm: Sequence[environments_pb2.WarmTarget] = field(default=(), init=False)
    """Newest warm-pool targets of the broker."""
    _images: Sequence[plan_pb2.PlannedImage] = field(default=(), init=False)
    """Images that plans at the broker expect here."""
    _news: deque[environments_pb2.Beginning] = field(init=False)
    """Starts that no broker has been told yet."""
    _confirmed: ConfirmedLeases = field(default_factory=ConfirmedLeases, init=False)
    """Leases that the present broker knows."""
    _generation: int = field(default_factory=time.time_ns, init=False)
    """Of the newest heartbeat: greater than those of this host's earlier processes."""
    _errands: set[asyncio.Task[None]] = field(default_factory=set, init=False)
    _expiring: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    _num_unheard: int = field(default=0, init=False)
    """Heartbeats in a row that the present broker has not answered."""
    _is_heard: bool = field(default=True, init=False)
    """True if a broker has taken the last heartbeat in."""
    _may_restart: bool = field(default=False, init=False)
    """True while the broker lets this host drain for a new spec."""

    def __post_init__(self) -> None:
        self._news = deque(maxlen=MAX_NEWS)

    async def run(self, stop: asyncio.Event) -> None:
        """Send heartbeats until told to stop, or until it is time to start again."""
        while not stop.is_set() and not self.is_due_to_restart:
            self.host.states.snapshots.taken.clear()
            await self.send()
            # While no renewal can arrive, a lease that looks expired may be in use.
            if self._is_heard:
                await self._run_in_background(self._expire())
            await self._wait_for_next(stop)

    async def _wait_for_next(self, stop: asyncio.Event) -> None:
        """Wait until the next heartbeat is due, or until told to stop."""
        waits = [asyncio.create_task(each) for each in (stop.wait(), self._sleep_until_due())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waits:
                each.cancel()

    async def _sleep_until_due(self) -> None:
        """Sleep for an interval, or until there is a new snapshot that leases may wait for."""
        await asyncio.sleep(MIN_INTERVAL_S)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(INTERVAL_S - MIN_INTERVAL_S):
                await self.host.states.snapshots.taken.wait()

    async def wait_until_empty(self, limit_s: float) -> None:
        """Keep leases alive that go on, for as long as the limit allows."""
        until_s = time.monotonic() + limit_s
        while not self.host.is_empty and time.monotonic() < until_s:
            await asyncio.sleep(INTERVAL_S)
            await self.send()
            await self._run_in_background(self._expire())

    @property
    def is_due_to_restart(self) -> bool:
        """True once this host is empty, and has drained for a spec that asks for another start."""
        return self._drains_for_spec and self.host.is_empty

    @property
    def _drains_for_spec(self) -> bool:
        return self._may_restart and self.follower is not None and self.follower.needs_restart

    async def send(self) -> None:
        """Send one heartbeat to the broker that this host belongs to, or to the next one."""
        held = self.host.held_leases()
        self._news.extend(each.beginning for each in self.host.start_tracker.take_beginnings())
        was_heard, self._is_heard = self._is_heard, False
        for target in await self.brokers.candidates(now_s=time.monotonic()):
            if await self._send_to(target, held):
                self._is_heard = True
                break
            if target == self.brokers.present and self._num_unheard < UNHEARD_BEFORE_MOVE:
                break  # it may only be starting again
        if was_heard and not self._is_heard:
            log.warning("no broker answers at %s", self.brokers.addresses.text)
        if not self._is_heard:
            self._warm = self._images = ()
        ready, awaited = self.host.driver.readiness(), self.host.start_tracker.num_awaited()
        wanted = warm_minimum.combined_targets([self._warm], ready, awaited, self.minimum)
        self.host.driver.keep_warm(wanted, max_shells=self.minimum.max_shells)
        if self.host.images is not None:
            self.host.images.want(WantedImage(each.template, each.image) for each in self._images)

    async def _send_to(self, target: str, held: Sequence[environments_pb2.HeldLease]) -> bool:
        """Send one broker a heartbeat; True if it has taken it in.

        Another broker than the present one gets every lease, and the host belongs to it then.
        """
        is_present = target == self.brokers.present
        confirmed = self._confirmed if is_present else ConfirmedLeases()
        answer = await self._ask_broker(target, confirmed, held)
        if answer is not None and not answer.generation and confirmed.generation:
            # A broker that started meanwhile, or had lost this host.
            confirmed.forget()
            answer = await self._ask_broker(target, confirmed, held)
        if answer is None:
            self._num_unheard += is_present
            if not is_present or self._num_unheard >= UNHEARD_BEFORE_MOVE:
                self.brokers.record_silence(target, now_s=time.monotonic())
            return False
        self.brokers.record_answer(answer.shards)
        if not is_present:
            await self._move(target, confirmed)
        self._num_unheard = 0
        self._warm, self._images = list(answer.warm), list(answer.images)
        self._may_restart = answer.may_restart
        if self.follower is not None:
            stub = self.brokers.stub(target)
            await self._run_in_background(self.follower.follow(answer.pool_revision, stub))
        self.host.renew(answer.renewed)
        await self._run_in_background(self.host.close(list(answer.close_lease_ids)))
        return True

    async def _move(self, target: str, confirmed: ConfirmedLeases) -> None:
        """Belong to another broker, which knows every lease, and let the last one forget."""
        last, self.brokers.present = self.brokers.present, target
        self._confirmed = confirmed
        if not last:
            return
        log.info("this host moved from the broker at %s to that at %s", last, target)
        if self._num_unheard or not self.brokers.present_name:
            return
        request = environments_pb2.HeartbeatRequest(
            node_id=self.node_id,
            endpoint=self.host.endpoint,
            generation=self._generation,
            moved_to=self.brokers.present_name,
        )
        try:
            await self.brokers.stub(last).Heartbeat(request, timeout=DEADLINE_S)
        except grpc.aio.AioRpcError as error:
            # It misses three heartbeats, and forgets this host then.
            log.info("broker at %s does not answer: %s", last, error.details())

    async def _ask_broker(
        self,
        target: str,
        confirmed: ConfirmedLeases,
        held: Sequence[environments_pb2.HeldLease],
    ) -> environments_pb2.HeartbeatResponse | None:
        """The answer of a broker to one heartbeat; None if there is none."""
        changes, news = confirmed.changes(held), list(self._news)
        self._generation += 1
        request = self._request(changes, news)
        try:
            answer = await self.brokers.stub(target).Heartbeat(request, timeout=DEADLINE_S)
        except grpc.aio.AioRpcError as error:
            log.info("broker at %s does not answer: %s", target, error.details())
            return None
        if answer.generation == request.generation:
            sent = [each.SerializeToString() for each in request.held]
            confirmed.confirm(changes, sent, request.generation)
        if answer.generation or not changes.base_generation:  # it was taken in
            for _ in news:
                self._news.popleft()
        return answer

    def _request(
        self, changes: LeaseChanges, news: Sequence[environments_pb2.Beginning]
    ) -> environments_pb2.HeartbeatRequest:
        readiness = self.host.driver.readiness()
        return environments_pb2.HeartbeatRequest(
            node_id=self.node_id,
            endpoint=self.host.endpoint,
            driver=self.host.driver.name,
            isolation=ISOLATION[self.host.driver.strength],
            slots=self.host.slots,
            held=changes.held,
            ended_lease_ids=changes.ended_lease_ids,
            generation=self._generation,
            base_generation=changes.base_generation,
            snapshots=self.host.states.snapshots.held_snapshots(),
            draining=self.draining or self._drains_for_spec,
            pool_revision="" if self.follower is None else self.follower.revision,
            levels=warm_minimum.template_levels(readiness, self.host.start_tracker.num_awaited()),
            free_memory_bytes=readiness.free_memory_bytes,
            queue_ms=round(readiness.queue_ms),
            can_preempt=self.host.driver.caps.files,
            begun=news,
            images=[] if self.host.images is None else self.host.images.digests,
            pulled_images=[] if self.host.images is None else self.host.images.pulled_digests,
        )

    async def _expire(self) -> None:
        async with self._expiring:
            expired = await self.host.expire(now_s=time.monotonic())
            log.log(logging.INFO if expired else logging.DEBUG, "expired: %s", expired)

    async def _run_in_background(self, work: Coroutine[None, None, None]) -> None:
        """Run slow work in the background: a host that misses three heartbeats is lost."""
        task = asyncio.create_task(work, name="end leases")
        self._errands.add(task)
        task.add_done_callback(self._errands.discard)
        await asyncio.wait([task], timeout=ERRAND_WAIT_S)
