"""Parts of waiting batches that other brokers have room for."""

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import grpc

from etude.envserver.broker.broker import TICK_S, Broker
from etude.envserver.broker.launch_queue import LaunchBatch, Offer, Turn
from etude.envserver.broker.shards.peers import Peer, Peers
from etude.v1 import broker_peers_pb2

log = logging.getLogger(__name__)

LEAST_WAIT_S = 0.25
"""A batch that waits for less may find room at its own broker."""
WAIT_MS = 1_000
"""Wait for a slot at the other broker; after it the environments wait at their own again."""
CALL_S = 90.0
"""Time limit of one part: the wait, and the start of its environments."""
MOST_AT_ONCE = 64

_QUEUE_TIMEOUT = "QueueTimeout"


class Spill(NamedTuple):
    """Environments of a waiting batch for another broker."""

    place: int
    """Of the batch among those that wait."""
    peer: str
    size: int


def choose_spills(
    waiting: Iterable[int], rooms: Mapping[str, int], most: int = MOST_AT_ONCE
) -> list[Spill]:
    """Batches that go to other brokers, the longest waiting first, each to the one with most room.

    Args:
        waiting: environments that wait, by batch.
        rooms: free slots of other brokers for which nothing waits there.
        most: number of batches.
    """
    left = {name: free for name, free in rooms.items() if free > 0}
    found: list[Spill] = []
    for place, count in enumerate(waiting):
        if not left or len(found) >= most:
            break
        peer = max(left, key=lambda name: (left[name], name))
        part = min(count, left[peer])
        if part:
            found.append(Spill(place, peer, part))
            left[peer] -= part
        if not left[peer]:
            del left[peer]
    return found


@dataclass(slots=True)
class Spills:
    """Parts of this broker's batches that others serve."""

    broker: Broker
    peers: Peers
    _running: dict[tuple[str, LaunchBatch], "asyncio.Task[None]"] = field(default_factory=dict)
    """By the other broker and the batch: at most one part at a time."""

    async def run(self, stop: asyncio.Event) -> None:
        """Hand on what waits until told to stop."""
        while not stop.is_set():
            self.start(now_s=time.monotonic())
            try:
                async with asyncio.timeout(TICK_S):
                    await stop.wait()
            except TimeoutError:
                continue
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)

    def start(self, *, now_s: float) -> None:
        """Hand on what has waited, if another broker has room."""
        by_name = {peer.name: peer for peer in self.peers.living}
        rooms = {name: peer.load.free for name, peer in by_name.items() if not peer.load.waiting}
        if not len(self.broker.queue) or not any(rooms.values()):
            return
        batches = [batch for batch in self.broker.queue.batches() if _may_go(batch, now_s)]
        batches.sort(key=lambda batch: batch.submitted_s)
        for place, name, count in choose_spills((len(b.waiting) for b in batches), rooms):
            batch, peer = batches[place], by_name[name]
            if (name, batch) not in self._running:
                self._start_part(batch, peer, count)

    def _start_part(self, batch: LaunchBatch, peer: Peer, count: int) -> None:
        indices = [index for index, _ in zip(list(batch.waiting), range(count), strict=False)]
        for index in indices:
            self.broker.queue.withdraw(batch, index)
        peer.load.free -= count
        work = self._run_part(batch, peer, indices)
        task = asyncio.create_task(work, name=f"part at {peer.name}")
        self._running[peer.name, batch] = task
        task.add_done_callback(lambda _: self._running.pop((peer.name, batch), None))

    async def _run_part(self, batch: LaunchBatch, peer: Peer, indices: list[int]) -> None:
        request = broker_peers_pb2.ForwardLaunchRequest(
            launch=batch.request, indices=indices, wait_ms=WAIT_MS
        )
        left = dict.fromkeys(indices)
        try:
            async for answer in self.peers.stub(peer).ForwardLaunch(request, timeout=CALL_S):
                outcome = answer.outcome
                if outcome.failure.reason == _QUEUE_TIMEOUT:
                    continue
                left.pop(outcome.index, None)
                self.broker.streams.deliver(batch, outcome)
        except grpc.aio.AioRpcError as error:
            log.info("broker %s gave no environments: %s", peer.name, error.details())
        finally:
            self._requeue(batch, reversed(left))

    def _requeue(self, batch: LaunchBatch, indices: Iterable[int]) -> None:
        if self.broker.streams.has_reader(batch):
            for index in indices:
                self.broker.queue.requeue(Turn(batch, index, Offer("", 0.0)))


def _may_go(batch: LaunchBatch, now_s: float) -> bool:
    """A snapshot is on hosts of this broker."""
    is_bound = bool(batch.placement_class.snapshot_id)
    return not is_bound and now_s - batch.submitted_s >= LEAST_WAIT_S
