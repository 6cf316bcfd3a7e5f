"""CPU budget of VM starts: a token bucket of CPU time, and the queue of starts that wait for it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple

_CPU_MS_PER_CORE_SECOND = 900.0
"""The remaining tenth is for running guests and for this process."""
_BURST_MS_PER_CORE = 100.0
_NEWEST = 0.1
"""Weight of the newest measurement in the moving average."""


class Work(Enum):
    """Kinds of work that are charged to the budget."""

    BOOT = "boot"
    RESTORE = "restore"
    """Start a VMM and restore a state in it."""
    SPAWN = "spawn"
    """Start a VMM that waits."""
    SHELL = "shell"
    """Restore a state in an idle VMM."""
    PAUSED_CLONE = "paused clone"
    """Resume a paused clone."""


ESTIMATES_MS: Mapping[Work, float] = MappingProxyType(
    {
        Work.BOOT: 2_400.0,
        Work.RESTORE: 45.0,
        Work.SPAWN: 20.0,
        Work.SHELL: 25.0,
        Work.PAUSED_CLONE: 2.0,
    }
)
"""CPU time of each, until it was measured here."""


@dataclass(slots=True)
class Costs:
    """Moving averages of what work costs, in CPU-ms."""

    _measured: dict[Work, float] = field(default_factory=dict)

    def of(self, work: Work) -> float:
        """Estimate the cost of one."""
        return self._measured.get(work, ESTIMATES_MS[work])

    def measured(self, work: Work, cpu_ms: float) -> None:
        """Add a measurement."""
        before = self._measured.get(work, cpu_ms)
        self._measured[work] = before + _NEWEST * (cpu_ms - before)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Token bucket of CPU time. It fills with time, and one start may overdraw it."""

    cores: int
    level_ms: float
    at_s: float = 0.0

    @property
    def burst_ms(self) -> float:
        """Capacity of the bucket."""
        return _BURST_MS_PER_CORE * self.cores

    @property
    def _rate(self) -> float:
        return _CPU_MS_PER_CORE_SECOND * self.cores

    def at(self, now_s: float) -> "Bucket":
        """Refill the bucket up to a time."""
        grown = self.level_ms + self._rate * max(now_s - self.at_s, 0.0)
        return replace(self, level_ms=min(grown, self.burst_ms), at_s=max(now_s, self.at_s))

    def wait_s(self, cost_ms: float) -> float:
        """Time until a cost may be spent; a cost above the capacity waits for a full bucket."""
        return max(0.0, min(cost_ms, self.burst_ms) - self.level_ms) / self._rate

    def paid_s(self, cost_ms: float) -> float:
        """Time until a cost is refilled, regardless of the capacity."""
        return max(0.0, cost_ms - self.level_ms) / self._rate

    def spent(self, cost_ms: float) -> "Bucket":
        """Spend a cost; the level may become negative."""
        return replace(self, level_ms=self.level_ms - cost_ms)


def full_bucket(cores: int) -> Bucket:
    """Create a full bucket."""
    return Bucket(cores=cores, level_ms=_BURST_MS_PER_CORE * cores)


class Admission(NamedTuple):
    """Tickets of starts that may begin now, and when to ask again."""

    tickets: tuple[int, ...]
    again_s: float | None
    """Seconds from now; None: when a start or VM has ended."""


class _Ask(NamedTuple):
    work: Work
    is_urgent: bool
    needs_room: bool


@dataclass(slots=True)
class Line:
    """Queue of starts: urgent ones first, then those made ahead of demand."""

    lanes: int
    """Limit of concurrent starts."""
    room: int
    """Limit of VMs in memory."""
    bucket: Bucket
    costs: Costs = field(default_factory=Costs)
    busy: int = 0
    live: int = 0
    _waiting: dict[int, _Ask] = field(default_factory=dict)
    _making: int = 0
    """Starts in progress that will add a VM."""

    def ask(self, ticket: int, work: Work, *, is_urgent: bool) -> None:
        """Enqueue a start. Idle VMMs and paused clones are counted as VMs already."""
        needs_room = work not in {Work.SHELL, Work.PAUSED_CLONE}
        self._waiting[ticket] = _Ask(work, is_urgent, needs_room)

    def leave(self, ticket: int) -> None:
        """Remove a start from the queue."""
        self._waiting.pop(ticket, None)

    def admit(self, *, now_s: float) -> Admission:
        """Admit starts in order; none overtakes one that waits for budget."""
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
        """Finish a start; the VM it made was counted before."""
        self.busy -= 1
        self._making -= work not in {Work.SHELL, Work.PAUSED_CLONE}

    def undone(self, work: Work) -> None:
        """Finish a start that did nothing, and refund its cost."""
        self.bucket = self.bucket.spent(-self.costs.of(work))
        self.ended(work)

    @property
    def free(self) -> int:
        """Number of VMs that still fit."""
        return max(0, self.room - self.live - self._making)

    @property
    def queue_ms(self) -> float:
        """Time until the budget covers all urgent starts."""
        asked = sum(self.costs.of(ask.work) for ask in self._waiting.values() if ask.is_urgent)
        return 1000 * self.bucket.paid_s(asked)

    @property
    def is_crowded(self) -> bool:
        """True if an urgent start waits for another VM to end."""
        urgent = (ask for ask in self._waiting.values() if ask.is_urgent)
        return self._is_full and any(ask.needs_room for ask in urgent)

    @property
    def _is_full(self) -> bool:
        return self.live + self._making >= self.room

    def _next(self) -> int | None:
        """Find the first start that fits, urgent ones first."""
        for is_urgent in (True, False):
            for ticket, ask in self._waiting.items():
                if ask.is_urgent is is_urgent and not (ask.needs_room and self._is_full):
                    return ticket
        return None
