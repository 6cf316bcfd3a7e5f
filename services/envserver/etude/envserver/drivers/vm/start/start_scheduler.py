"""Concurrency limits of VM starts and of running VMs, first come first served."""

import asyncio
import contextlib
import itertools
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from etude.envserver.drivers.vm.interface import Vmm
from etude.envserver.drivers.vm.start.cpu_budget import (
    StartCosts,
    StartQueue,
    StartWork,
    full_bucket,
)

VM_BYTES = 18 << 20
"""Private memory of a frozen VM, on top of what it shares with its template."""
RESERVE_BYTES = 1 << 30
"""Memory kept free for this process, templates, and guests at work."""
_RUNNING_PER_CORE = 2
"""More only slow each other down: 32 running guests on two cores took three times as long."""
SLOT_WAIT_S = 1.0
"""A read of a millisecond must not wait for commands that last minutes."""


class StartScheduler:
    """Schedules VM starts: as many at a time as cores, within a CPU budget."""

    def __init__(
        self,
        *,
        cores: int,
        room: int,
        slot_wait_s: float = SLOT_WAIT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start without running VMs.

        Args:
            cores: cores of this host process.
            room: limit of VMs in memory.
            slot_wait_s: time after which a waiting guest runs without a slot.
            clock: in seconds.
        """
        self.run_slots = RunSlots(_RUNNING_PER_CORE * cores, slot_wait_s)
        self._queue = StartQueue(
            max_concurrent=cores, room=room, bucket=full_bucket(cores, at_s=clock())
        )
        self._clock = clock
        self._tickets = itertools.count()
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._again: asyncio.TimerHandle | None = None
        self._crowded: list[Callable[[], None]] = []

    @property
    def costs(self) -> StartCosts:
        return self._queue.costs

    @property
    def free_bytes(self) -> int:
        return self._queue.free * VM_BYTES

    @property
    def queue_ms(self) -> float:
        """Time until all who wait now have started, by the CPU budget."""
        return self._queue.queue_ms

    def on_crowded(self, ask: Callable[[], None]) -> None:
        """Register a callback for when a start waits for another VM to end."""
        self._crowded.append(ask)

    def remove_crowded(self, ask: Callable[[], None]) -> None:
        """Remove a callback that was registered."""
        self._crowded.remove(ask)

    @contextlib.asynccontextmanager
    async def acquire_start(
        self, work: StartWork, *, is_urgent: bool = True
    ) -> AsyncIterator[None]:
        """Hold a start slot, paid from the CPU budget.

        Raises:
            CancelledError: the waiting task was cancelled; nothing was taken.
        """
        ticket = next(self._tickets)
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[ticket] = granted
        self._queue.enqueue(ticket, work, is_urgent=is_urgent)
        self._admit()
        try:
            await granted
        except asyncio.CancelledError:
            if self._waiting.pop(ticket, None) is None:
                self._queue.refund(work)
            self._queue.dequeue(ticket)
            self._admit()
            raise
        try:
            yield
        finally:
            self._queue.finish(work)
            self._admit()

    def watch(self, vm: Vmm) -> None:
        """Count a VM until it has exited."""
        self._queue.live += 1

        def on_exit(_: object) -> None:
            self._queue.live -= 1
            self._admit()

        vm.exited.add_done_callback(on_exit)

    def _admit(self) -> None:
        admission = self._queue.admit(now_s=self._clock())
        for ticket in admission.tickets:
            granted = self._waiting.pop(ticket)
            if granted.cancelled():
                continue  # its acquire_start() is about to be cancelled
            granted.set_result(None)
        if self._again is not None:
            self._again.cancel()
            self._again = None
        if admission.again_s is not None:
            loop = asyncio.get_running_loop()
            self._again = loop.call_later(admission.again_s, self._admit)
        if self._queue.is_crowded:
            for ask in self._crowded:
                ask()


class RunSlots:
    """Slots for running VMs, in order; a waiter runs without a free slot after a time limit."""

    def __init__(self, count: int, wait_limit_s: float) -> None:
        self.count, self.wait_limit_s = count, wait_limit_s
        self.taken = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def take(self) -> None:
        """Wait for a slot and take it; the caller gives it back.

        Raises:
            CancelledError: the waiting task was cancelled; nothing was taken.
        """
        if self.taken < self.count and not self._waiting:
            self.taken += 1
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(granted)
        try:
            await asyncio.wait([granted], timeout=self.wait_limit_s)
        except asyncio.CancelledError:
            self._cancel_wait(granted)
            raise
        if not granted.done():
            self._waiting.remove(granted)
            self.taken += 1

    def take_now(self) -> None:
        """Take a slot for a guest that runs already, ahead of all who wait."""
        self.taken += 1

    def give(self) -> None:
        self.taken -= 1
        while self._waiting and self.taken < self.count:
            self.taken += 1
            self._waiting.popleft().set_result(None)

    def _cancel_wait(self, granted: "asyncio.Future[None]") -> None:
        if granted.done():
            self.give()
        else:
            self._waiting.remove(granted)


def host_cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def host_memory_bytes() -> int:
    """Memory of this machine or container."""
    sizes = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    with contextlib.suppress(OSError, ValueError):
        sizes.append(int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii")))
    return min(sizes)


def host_room() -> int:
    """Number of VMs that fit the memory of this machine or container."""
    return max(1, (host_memory_bytes() - RESERVE_BYTES) // VM_BYTES)
