"""Demand of the last minutes, and the capacity that has to be ready for it. Pure."""

import math
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

WINDOW_S = 300.0
"""Demand older than this counts no more: bursts that come more rarely wait once."""
MARGIN = 1.3
"""Of the highest demand: the next burst may be larger by as much, and by one at least."""


class Demand(NamedTuple):
    """Units that were asked for at one time."""

    at_s: float
    units: int


@dataclass(slots=True)
class DemandPeak:
    """Highest demand of the last minutes."""

    _peaks: deque[Demand] = field(default_factory=deque)
    """In the order of time; none is followed by a higher one."""

    def record(self, units: int, *, now_s: float) -> None:
        """Record the demand, which has just grown."""
        while self._peaks and self._peaks[-1].units <= units:
            self._peaks.pop()
        self._peaks.append(Demand(now_s, units))

    def highest(self, *, now_s: float, window_s: float = WINDOW_S) -> int:
        """Find the highest demand in the window; 0 if nothing was asked for."""
        while self._peaks and now_s - self._peaks[0].at_s > window_s:
            self._peaks.popleft()
        return self._peaks[0].units if self._peaks else 0


def units_needed(peak: int) -> int:
    """Units that have to be ready, those in use included."""
    return math.ceil(MARGIN * peak)
