"""Turns at starting machines, and places for those that run: whoever must wait does so in order."""

import asyncio
import contextlib
import itertools
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from etude.envserver.drivers.machines.pace import Costs, Line, Work, full_bucket
from etude.envserver.drivers.machines.protocol import Monitor

MACHINE_BYTES = 18 << 20
"""What a machine holds that stands still, beside what it shares with its template."""
RESERVE_BYTES = 1 << 30
"""Of the host's memory: for the node, templates, and guests at work."""
_RUNNING_PER_CORE = 2
"""More than that slow each other: 32 running guests on two cores took three times as long."""
PATIENCE_S = 1.0
"""Commands may last for minutes, and a neighbour's read of a millisecond is not to wait for it."""


class Lanes:
    """The pace of one node: as many starts at a time as cores, within a budget of CPU time."""

    def __init__(
        self,
        *,
        cores: int,
        room: int,
        patience_s: float = PATIENCE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Nothing runs yet.

        Args:
            cores: of the host, for this node.
            room: how many machines there may be.
            patience_s: how long a guest waits for a place before it runs beside all others.
            clock: in seconds.
        """
        self.places = Places(_RUNNING_PER_CORE * cores, patience_s)
        self._line = Line(lanes=cores, room=room, bucket=full_bucket(cores).at(clock()))
        self._clock = clock
        self._tickets = itertools.count()
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._again: asyncio.TimerHandle | None = None
        self._crowded: list[Callable[[], None]] = []

    @property
    def costs(self) -> Costs:
        """What work costs here."""
        return self._line.costs

    @property
    def free_bytes(self) -> int:
        """Memory for more machines."""
        return self._line.free * MACHINE_BYTES

    @property
    def queue_ms(self) -> float:
        """Until everybody who waits now has begun, by the budget of CPU time."""
        return self._line.queue_ms

    def when_crowded(self, ask: Callable[[], None]) -> None:
        """Have this called whenever somebody waits for another machine to end."""
        self._crowded.append(ask)

    @contextlib.asynccontextmanager
    async def turn(self, work: Work, *, is_urgent: bool = True) -> AsyncIterator[None]:
        """A lane, and the budget for this work.

        Args:
            work: what is done in it.
            is_urgent: whether somebody waits for it.

        Raises:
            CancelledError: whoever waited has gone; nothing was used.
        """
        ticket = next(self._tickets)
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[ticket] = granted
        self._line.ask(ticket, work, is_urgent=is_urgent)
        self._admit()
        try:
            await granted
        except asyncio.CancelledError:
            if self._waiting.pop(ticket, None) is None:
                self._line.undone(work)
            self._line.leave(ticket)
            self._admit()
            raise
        try:
            yield
        finally:
            self._line.ended(work)
            self._admit()

    def watch(self, vm: Monitor) -> None:
        """Count a machine until it has ended."""
        self._line.live += 1

        def ended(_: object) -> None:
            self._line.live -= 1
            self._admit()

        vm.exited.add_done_callback(ended)

    def _admit(self) -> None:
        admission = self._line.admit(now_s=self._clock())
        for ticket in admission.tickets:
            granted = self._waiting.pop(ticket)
            if granted.cancelled():
                continue  # its turn() is about to hear of it
            granted.set_result(None)
        if self._again is not None:
            self._again.cancel()
            self._again = None
        if admission.again_s is not None:
            loop = asyncio.get_running_loop()
            self._again = loop.call_later(admission.again_s, self._admit)
        if self._line.is_crowded:
            for ask in self._crowded:
                ask()


class Places:
    """Room for so many at a time, in order; who has waited too long comes in beside them."""

    def __init__(self, count: int, patience_s: float) -> None:
        """All are free."""
        self.count, self.patience_s = count, patience_s
        self.taken = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def take(self) -> None:
        """Wait for a place and take it; it has to be given back.

        Raises:
            CancelledError: whoever waited has gone; no place was taken.
        """
        if self.taken < self.count and not self._waiting:
            self.taken += 1
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(granted)
        try:
            await asyncio.wait([granted], timeout=self.patience_s)
        except asyncio.CancelledError:
            self._leave(granted)
            raise
        if not granted.done():
            self._waiting.remove(granted)
            self.taken += 1

    def enter(self) -> None:
        """Take a place for a guest that runs already, whoever waits."""
        self.taken += 1

    def give(self) -> None:
        """Leave a place to the next."""
        self.taken -= 1
        while self._waiting and self.taken < self.count:
            self.taken += 1
            self._waiting.popleft().set_result(None)

    def _leave(self, granted: "asyncio.Future[None]") -> None:
        if granted.done():
            self.give()
        else:
            self._waiting.remove(granted)


def host_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def host_room() -> int:
    """How many machines the memory of this host, or of this container, has room for."""
    sizes = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    with contextlib.suppress(OSError, ValueError):
        sizes.append(int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii")))
    return max(1, (min(sizes) - RESERVE_BYTES) // MACHINE_BYTES)
