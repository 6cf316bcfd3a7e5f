"""Heartbeats of a host to its brokers: leases and levels out, orders back, every second."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import grpc

from etude.common import broker_shards
from etude.envserver.host import warm_minimum
from etude.envserver.host.host import Host
from etude.envserver.host.leases.lease_changes import ConfirmedLeases, LeaseChanges
from etude.envserver.host.leases.lease_fields import ISOLATION
from etude.envserver.host.task_images import WantedImage
from etude.envserver.host.warm_minimum import NO_MINIMUM, WarmMinimum
from etude.v1 import environments_pb2, environments_pb2_grpc, plan_pb2

log = logging.getLogger(__name__)

INTERVAL_S = 1.0
MAX_NEWS = 4_096
"""Starts that wait for a broker that does not answer; the oldest are forgotten first."""
MAX_BACKOFF_MS = 1_000
"""A broker that comes back waits 2 s for its hosts before it grants anything."""
ERRAND_WAIT_S = 0.2
"""Most leases end sooner."""
DEADLINE_S = 2.0
"""A broker that needs longer is overloaded; after three missed heartbeats the host is lost."""


@dataclass(slots=True)
class HostHeartbeat:
    """Sends each broker the state of its runs' leases, and carries out the answers."""

    host: Host
    brokers: "Sequence[environments_pb2_grpc.EnvBrokerServiceAsyncStub]"
    """Brokers of the pool, in their order."""
    node_id: str
    draining: bool = False
    minimum: WarmMinimum = NO_MINIMUM
    """Warm-pool bounds of the pool."""
    _warm: dict[int, Sequence[environments_pb2.WarmTarget]] = field(
        default_factory=dict, init=False
    )
    """Newest warm-pool targets of each broker."""
    _images: dict[int, Sequence[plan_pb2.PlannedImage]] = field(default_factory=dict, init=False)
    """Images that plans at each broker expect here."""
    _news: list[deque[environments_pb2.Beginning]] = field(init=False)
    """Starts that each broker has not been told yet."""
    _confirmed: list[ConfirmedLeases] = field(init=False)
    """Leases that each broker knows."""
    _generation: int = field(default_factory=time.time_ns, init=False)
    """Of the newest heartbeat: greater than those of this host's earlier processes."""
    _errands: set[asyncio.Task[None]] = field(default_factory=set, init=False)
    _expiring: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    _unheard: set[int] = field(default_factory=set, init=False)
    """Brokers that did not answer the last heartbeat."""

    def __post_init__(self) -> None:
        self._news = [deque(maxlen=MAX_NEWS) for _ in self.brokers]
        self._confirmed = [ConfirmedLeases() for _ in self.brokers]

    async def run(self, stop: asyncio.Event) -> None:
        """Send heartbeats until told to stop."""
        while not stop.is_set():
            await self.send()
            # While no renewal can arrive, a lease that looks expired may be in use.
            if not self._unheard:
                await self._run_in_background(self._expire())
            try:
                async with asyncio.timeout(INTERVAL_S):
                    await stop.wait()
            except TimeoutError:
                continue

    async def send(self) -> None:
        """Send one heartbeat to all brokers; a silent one changes nothing on this host."""
        held, count = self.host.held_leases(), len(self.brokers)
        shares: list[list[environments_pb2.HeldLease]] = [[] for _ in self.brokers]
        for each in held:
            shares[broker_shards.shard_of(each.run_id, count)].append(each)
        for news in self.host.start_tracker.take_beginnings():
            self._news[broker_shards.shard_of(news.run_id, count)].append(news.beginning)
        beats = (
            self._send_to_broker(index, share, len(held)) for index, share in enumerate(shares)
        )
        await asyncio.gather(*beats)
        ready, awaited = self.host.driver.readiness(), self.host.start_tracker.num_awaited()
        wanted = warm_minimum.combined_targets(self._warm.values(), ready, awaited, self.minimum)
        self.host.driver.keep_warm(wanted, max_shells=self.minimum.max_shells)
        if self.host.images is not None:
            rounds = zip_longest(*self._images.values())
            expected = (each for images in rounds for each in images if each is not None)
            self.host.images.want(WantedImage(each.template, each.image) for each in expected)

    async def _send_to_broker(
        self, index: int, held: Sequence[environments_pb2.HeldLease], num_held: int
    ) -> None:
        """Send one broker its share: slots with leases of other brokers' runs do not count."""
        confirmed = self._confirmed[index]
        answer = await self._ask_broker(index, confirmed.changes(held), held, num_held)
        if answer is not None and not answer.generation and confirmed.generation:
            # A broker that started meanwhile, or had lost this host.
            confirmed.forget()
            answer = await self._ask_broker(index, confirmed.changes(held), held, num_held)
        if answer is None:
            self._unheard.add(index)
            self._warm.pop(index, None)
            self._images.pop(index, None)
            return
        self._unheard.discard(index)
        self._warm[index] = list(answer.warm)
        self._images[index] = list(answer.images)
        self.host.renew(answer.renewed)
        await self._run_in_background(self.host.close(list(answer.close_lease_ids)))

    async def _ask_broker(
        self,
        index: int,
        changes: LeaseChanges,
        held: Sequence[environments_pb2.HeldLease],
        num_held: int,
    ) -> environments_pb2.HeartbeatResponse | None:
        """The answer of a broker to one heartbeat; None if there is none."""
        readiness, news = self.host.driver.readiness(), list(self._news[index])
        self._generation += 1
        request = environments_pb2.HeartbeatRequest(
            node_id=self.node_id,
            endpoint=self.host.endpoint,
            driver=self.host.driver.name,
            isolation=ISOLATION[self.host.driver.strength],
            slots=max(0, self.host.slots - (num_held - len(held))),
            held=changes.held,
            ended_lease_ids=changes.ended_lease_ids,
            generation=self._generation,
            base_generation=changes.base_generation,
            snapshots=self._snapshots(index),
            draining=self.draining,
            levels=warm_minimum.template_levels(readiness, self.host.start_tracker.num_awaited()),
            free_memory_bytes=readiness.free_memory_bytes,
            queue_ms=round(readiness.queue_ms),
            begun=news,
            images=[] if self.host.images is None else self.host.images.digests,
            pulled_images=[] if self.host.images is None else self.host.images.pulled_digests,
        )
        try:
            answer = await self.brokers[index].Heartbeat(request, timeout=DEADLINE_S)
        except grpc.aio.AioRpcError as error:
            if index not in self._unheard:
                log.warning("broker %d does not answer: %s", index, error.details())
            return None
        if answer.generation == request.generation:
            sent = [each.SerializeToString() for each in request.held]
            self._confirmed[index].confirm(changes, sent, request.generation)
        if answer.generation or not changes.base_generation:  # it was taken in
            for _ in news:
                self._news[index].popleft()
        return answer

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

    def _snapshots(self, index: int) -> Iterable[environments_pb2.HeldSnapshot]:
        shard = broker_shards.BrokerShard(index, len(self.brokers))
        return [
            each
            for each in self.host.states.snapshots.held_snapshots()
            if shard.serves(each.run_id)
        ]
