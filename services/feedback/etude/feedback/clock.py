"""Clock of a service's decisions, which a change of the machine's time does not move."""

import time
from dataclasses import dataclass, field


@dataclass(slots=True)
class LedgerClock:
    """Time of decisions: the server's at the start, then by a clock that cannot be set.

    It never begins before a time that was recorded.
    """

    recorded_ms: int
    _start_ms: int = field(init=False)
    _started_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._start_ms = max(self.recorded_ms, time.time_ns() // 1_000_000)
        self._started_s = time.monotonic()

    def now_ms(self) -> int:
        return self._start_ms + int(1_000 * (time.monotonic() - self._started_s))
