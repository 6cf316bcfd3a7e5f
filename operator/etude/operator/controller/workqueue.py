"""Workqueue: deduplicates keys, delays retries with backoff, serves urgent keys first."""

import asyncio
import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from etude.operator import metrics
from etude.operator.manifests import Ref

FAIR_SHARE = 4
"""One key in this many is taken from those that are not urgent, so that none starves."""
FIRST_RETRY_S = 0.005
LONGEST_RETRY_S = 60.0
MAX_SUPERSEDED = 8
"""Superseded heap entries per valid one before the heap is rebuilt: every pass over a run with a
far deadline adds one."""


def _never(_: Ref) -> bool:
    return False


@dataclass(slots=True)
class WorkQueue:
    """A de-duplicating queue; use it from one event loop."""

    jitter: Callable[[], float] = random.random  # noqa: S311 - no secret
    """Jitter: the fraction of the full backoff that a retry waits, so that keys which failed
    together do not retry together."""
    is_urgent: Callable[[Ref], bool] = _never
    """Decides whether a queued key goes before those that are not urgent."""
    _waiting: dict[Ref, float] = field(default_factory=dict)
    """Time at which each key was queued, oldest first."""
    _urgent: dict[Ref, float] = field(default_factory=dict)
    """The same of urgent keys."""
    _turn: int = 0
    _working: set[Ref] = field(default_factory=set)
    _dirty: set[Ref] = field(default_factory=set)
    """Keys added while a worker had them."""
    _due: dict[Ref, float] = field(default_factory=dict)
    """Due time of each delayed key, on the event loop's clock."""
    _heap: list[tuple[float, Ref]] = field(default_factory=list)
    _failures: dict[Ref, int] = field(default_factory=dict)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def __len__(self) -> int:
        return len(self._waiting) + len(self._urgent)

    def add(self, key: Ref) -> None:
        """Queue a key; one that a worker has is queued again when the worker is done."""
        metrics.QUEUE_ADDS.inc()
        self._due.pop(key, None)
        if key in self._working:
            self._dirty.add(key)
        elif key not in self._urgent:
            self._enqueue(key)
            metrics.QUEUE_DEPTH.set(len(self))
            self._changed.set()

    def add_after(self, key: Ref, delay_s: float) -> None:
        """Queue a key after a delay, unless it is due earlier already."""
        if delay_s <= 0:
            self.add(key)
            return
        due = asyncio.get_running_loop().time() + delay_s
        if (
            due < self._due.get(key, float("inf"))
            and key not in self._waiting
            and key not in self._urgent
        ):
            self._due[key] = due
            heapq.heappush(self._heap, (due, key))
            self._changed.set()
            if len(self._heap) > MAX_SUPERSEDED * (len(self._due) + 1):
                self._heap = [(at, each) for each, at in self._due.items()]
                heapq.heapify(self._heap)

    async def take(self) -> Ref:
        """Take the next key; mark_done() or retry() must follow."""
        while True:
            next_due_s = self._enqueue_due()
            if len(self):
                line = self._next_queue()
                key = next(iter(line))
                since = line.pop(key)
                self._working.add(key)
                metrics.QUEUE_DEPTH.set(len(self))
                metrics.QUEUE_WAIT_SECONDS.observe(asyncio.get_running_loop().time() - since)
                return key
            self._changed.clear()
            timeout = asyncio.timeout(next_due_s)
            try:
                async with timeout:
                    await self._changed.wait()
            except TimeoutError:
                continue

    def mark_done(self, key: Ref) -> None:
        """Report a successful pass over a key."""
        self._failures.pop(key, None)
        self._release(key)

    def retry(self, key: Ref) -> float:
        """Report a failed pass; queues the key with backoff and returns the delay in seconds."""
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        metrics.QUEUE_RETRIES.inc()
        limit_s = min(FIRST_RETRY_S * 2 ** min(failures, 30), LONGEST_RETRY_S)
        delay_s: float = limit_s * self.jitter()
        self._release(key)
        self.add_after(key, delay_s)
        return delay_s

    def _enqueue(self, key: Ref) -> None:
        now = asyncio.get_running_loop().time()
        if self.is_urgent(key):
            self._urgent[key] = self._waiting.pop(key, now)
        else:
            self._waiting.setdefault(key, now)

    def _next_queue(self) -> dict[Ref, float]:
        """Choose the urgent keys, or the others in their share of turns or if none is urgent."""
        self._turn = (self._turn + 1) % FAIR_SHARE
        if self._urgent and (self._turn or not self._waiting):
            return self._urgent
        return self._waiting

    def _release(self, key: Ref) -> None:
        self._working.discard(key)
        if key in self._dirty:
            self._dirty.discard(key)
            self.add(key)

    def _enqueue_due(self) -> float | None:
        now = asyncio.get_running_loop().time()
        while self._heap:
            due, key = self._heap[0]
            if self._due.get(key) != due:
                heapq.heappop(self._heap)  # superseded
            elif due <= now:
                heapq.heappop(self._heap)
                self.add(key)
            else:
                return due - now
        return None
