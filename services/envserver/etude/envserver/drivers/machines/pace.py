"""How fast a node may start machines: a budget of CPU time, and an order of who is next."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple

_CPU_MS_PER_CORE_SECOND = 900.0
"""The tenth that is left is for guests that run already, and for the node itself."""
_BURST_MS_PER_CORE = 100.0
_NEWEST = 0.1
"""Weight of a measurement against all before it."""


class Work(Enum):
    """What costs a node CPU time."""

    BOOT = "boot"
    RESTORE = "restore"
    """A monitor is started and takes up a state."""
    SPAWN = "spawn"
    """A monitor is started and waits."""
    SHELL = "shell"
    """A monitor that waits takes up a state."""
    PAUSED_CLONE = "paused clone"
    """A clone that stands still is let run."""


ESTIMATES_MS: Mapping[Work, float] = MappingProxyType(
    {
        Work.BOOT: 2_400.0,
        Work.RESTORE: 45.0,
        Work.SPAWN: 20.0,
        Work.SHELL: 25.0,
        Work.PAUSED_CLONE: 2.0,
    }
)
"""CPU time of one, until this node has measured its own."""


@dataclass(slots=True)
class Costs:
    """What each kind of work costs on this node, in CPU-ms."""

    _measured: dict[Work, float] = field(default_factory=dict)

    def of(self, work: Work) -> float:
        """The best guess."""
        return self._measured.get(work, ESTIMATES_MS[work])

    def measured(self, work: Work, cpu_ms: float) -> None:
        """Learn from one that has ended."""
        before = self._measured.get(work, cpu_ms)
        self._measured[work] = before + _NEWEST * (cpu_ms - before)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """CPU time that may be spent on starts. It fills with time, and may be overdrawn by one."""

    cores: int
    level_ms: float
    at_s: float = 0.0

    @property
    def burst_ms(self) -> float:
        """What is in it at most."""
        return _BURST_MS_PER_CORE * self.cores

    @property
    def _rate(self) -> float:
        return _CPU_MS_PER_CORE_SECOND * self.cores

    def at(self, now_s: float) -> "Bucket":
        """The same bucket later."""
        grown = self.level_ms + self._rate * max(now_s - self.at_s, 0.0)
        return replace(self, level_ms=min(grown, self.burst_ms), at_s=max(now_s, self.at_s))

    def wait_s(self, cost_ms: float) -> float:
        """Until so much may be spent. What is dearer than a full bucket waits for a full one."""
        return max(0.0, min(cost_ms, self.burst_ms) - self.level_ms) / self._rate

    def paid_s(self, cost_ms: float) -> float:
        """Until so much has come in, however much fits in at a time."""
        return max(0.0, cost_ms - self.level_ms) / self._rate

    def spent(self, cost_ms: float) -> "Bucket":
        """After so much was spent; the level may be below zero."""
        return replace(self, level_ms=self.level_ms - cost_ms)


def full_bucket(cores: int) -> Bucket:
    """A bucket that nothing was taken from yet."""
    return Bucket(cores=cores, level_ms=_BURST_MS_PER_CORE * cores)


class Admission(NamedTuple):
    """Who may begin now, and when to ask again."""

    tickets: tuple[int, ...]
    again_s: float | None
    """Seconds from now; None: when something has ended."""


class _Ask(NamedTuple):
    work: Work
    is_urgent: bool
    needs_room: bool


@dataclass(slots=True)
class Line:
    """Who waits to begin, in order: those whom somebody waits for before those done ahead."""

    lanes: int
    """How much is done at a time."""
    room: int
    """How many machines there may be at a time."""
    bucket: Bucket
    costs: Costs = field(default_factory=Costs)
    busy: int = 0
    live: int = 0
    _waiting: dict[int, _Ask] = field(default_factory=dict)
    _making: int = 0
    """Of those in lanes: how many will be one machine more."""

    def ask(self, ticket: int, work: Work, *, is_urgent: bool) -> None:
        """Wait for a turn. A shell and a paused clone are machines already."""
        needs_room = work not in {Work.SHELL, Work.PAUSED_CLONE}
        self._waiting[ticket] = _Ask(work, is_urgent, needs_room)

    def leave(self, ticket: int) -> None:
        """Wait no more."""
        self._waiting.pop(ticket, None)

    def admit(self, *, now_s: float) -> Admission:
        """Let in who may begin, in order: nobody overtakes whom there is no budget for yet."""
        self.bucket = self.bucket.at(now_s)
        admitted: list[int] = []
        while self.busy < self.lanes and (ticket := self._next()) is not None:
            ask = self._waiting[ticket]
            wait_s = self.bucket.wait_s(self.costs.of(ask.work))
            if wait_s > 0:
                return Admission(tuple(admitted), wait_s)
            del self._waiting[ticket]
            self.bucket = self.bucket.spent(self.costs.of(ask.work))
            self.busy += 1
            self._making += ask.needs_room
            admitted.append(ticket)
        return Admission(tuple(admitted), None)

    def ended(self, work: Work) -> None:
        """A turn is over; what it made was counted by then."""
        self.busy -= 1
        self._making -= work not in {Work.SHELL, Work.PAUSED_CLONE}

    def undone(self, work: Work) -> None:
        """A turn is over in which nothing was done."""
        self.bucket = self.bucket.spent(-self.costs.of(work))
        self.ended(work)

    @property
    def free(self) -> int:
        """Machines that there is room for."""
        return max(0, self.room - self.live - self._making)

    @property
    def queue_ms(self) -> float:
        """Until the budget has been there for all who wait urgently."""
        asked = sum(self.costs.of(ask.work) for ask in self._waiting.values() if ask.is_urgent)
        return 1000 * self.bucket.paid_s(asked)

    @property
    def is_crowded(self) -> bool:
        """Whether somebody waits for another machine to end."""
        urgent = (ask for ask in self._waiting.values() if ask.is_urgent)
        return self._is_full and any(ask.needs_room for ask in urgent)

    @property
    def _is_full(self) -> bool:
        return self.live + self._making >= self.room

    def _next(self) -> int | None:
        """The first that has room, urgent ones before all others."""
        for is_urgent in (True, False):
            for ticket, ask in self._waiting.items():
                if ask.is_urgent is is_urgent and not (ask.needs_room and self._is_full):
                    return ticket
        return None
