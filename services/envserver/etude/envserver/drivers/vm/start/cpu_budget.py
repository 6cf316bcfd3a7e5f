"""CPU budget of VM starts: a token bucket of CPU time, and the queue of starts that wait for it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple

from etude.common.token_bucket import TokenBucket

_CPU_MS_PER_CORE_SECOND = 900.0
"""The remaining tenth is for running guests and for this process."""
_BURST_MS_PER_CORE = 100.0
_NEWEST = 0.1
"""Weight of the newest measurement in the moving average."""


class StartWork(Enum):
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


ESTIMATES_MS: Mapping[StartWork, float] = MappingProxyType(
    {
        StartWork.BOOT: 2_400.0,
        StartWork.RESTORE: 45.0,
        StartWork.SPAWN: 20.0,
        StartWork.SHELL: 25.0,
        StartWork.PAUSED_CLONE: 2.0,
    }
)
"""CPU time of each, until it was measured here."""


@dataclass(slots=True)
class StartCosts:
    """Moving averages of what work costs, in CPU-ms."""

    _measured: dict[StartWork, float] = field(default_factory=dict)

    def estimate_ms(self, work: StartWork) -> float:
        return self._measured.get(work, ESTIMATES_MS[work])

    def add_measurement(self, work: StartWork, cpu_ms: float) -> None:
        before = self._measured.get(work, cpu_ms)
        self._measured[work] = before + _NEWEST * (cpu_ms - before)


def full_bucket(cores: int, *, at_s: float = 0.0) -> TokenBucket:
    """Create a full bucket of CPU-ms."""
    return TokenBucket.full(_CPU_MS_PER_CORE_SECOND * cores, _BURST_MS_PER_CORE * cores, at_s=at_s)


def start_wait_s(bucket: TokenBucket, cost_ms: float) -> float:
    """Time until a start may be paid; one above the capacity waits for a full bucket."""
    return bucket.wait_s(min(cost_ms, bucket.burst))


class StartAdmission(NamedTuple):
    """Tickets of starts that may begin now, and when to ask again."""

    tickets: tuple[int, ...]
    again_s: float | None
    """Seconds from now; None: when a start or VM has ended."""


class _Ask(NamedTuple):
    work: StartWork
    is_urgent: bool
    needs_room: bool


@dataclass(slots=True)
class StartQueue:
    """Queue of starts: urgent ones first, then those made ahead of demand."""

    max_concurrent: int
    room: int
    """Limit of VMs in memory."""
    bucket: TokenBucket
    costs: StartCosts = field(default_factory=StartCosts)
    busy: int = 0
    live: int = 0
    _waiting: dict[int, _Ask] = field(default_factory=dict)
    _making: int = 0
    """Starts in progress that will add a VM."""

    def enqueue(self, ticket: int, work: StartWork, *, is_urgent: bool) -> None:
        """Enqueue a start. Idle VMMs and paused clones are counted as VMs already."""
        needs_room = work not in {StartWork.SHELL, StartWork.PAUSED_CLONE}
        self._waiting[ticket] = _Ask(work, is_urgent, needs_room)

    def dequeue(self, ticket: int) -> None:
        self._waiting.pop(ticket, None)

    def admit(self, *, now_s: float) -> StartAdmission:
        """Admit starts in order; none overtakes one that waits for budget."""
        self.bucket = self.bucket.refill(now_s)
        admitted: list[int] = []
        while self.busy < self.max_concurrent and (ticket := self._first_admissible()) is not None:
            ask = self._waiting[ticket]
            cost_ms = self.costs.estimate_ms(ask.work)
            wait_s = start_wait_s(self.bucket, cost_ms)
            if wait_s > 0:
                return StartAdmission(tuple(admitted), wait_s)
            del self._waiting[ticket]
            self.bucket = self.bucket.take(cost_ms)
            self.busy += 1
            self._making += ask.needs_room
            admitted.append(ticket)
        return StartAdmission(tuple(admitted), None)

    def finish(self, work: StartWork) -> None:
        """Finish a start; the VM it made was counted before."""
        self.busy -= 1
        self._making -= work not in {StartWork.SHELL, StartWork.PAUSED_CLONE}

    def refund(self, work: StartWork) -> None:
        """Finish a start that did nothing, and refund its cost."""
        self.bucket = self.bucket.take(-self.costs.estimate_ms(work))
        self.finish(work)

    @property
    def free(self) -> int:
        """Number of VMs that still fit."""
        return max(0, self.room - self.live - self._making)

    @property
    def queue_ms(self) -> float:
        """Time until the budget covers all urgent starts."""
        asked = sum(
            self.costs.estimate_ms(ask.work) for ask in self._waiting.values() if ask.is_urgent
        )
        return 1000 * self.bucket.wait_s(asked)

    @property
    def is_crowded(self) -> bool:
        """True if an urgent start waits for another VM to end."""
        urgent = (ask for ask in self._waiting.values() if ask.is_urgent)
        return self._is_full and any(ask.needs_room for ask in urgent)

    @property
    def _is_full(self) -> bool:
        return self.live + self._making >= self.room

    def _first_admissible(self) -> int | None:
        """Find the first start that fits, urgent ones first."""
        for is_urgent in (True, False):
            for ticket, ask in self._waiting.items():
                if ask.is_urgent is is_urgent and not (ask.needs_room and self._is_full):
                    return ticket
        return None
