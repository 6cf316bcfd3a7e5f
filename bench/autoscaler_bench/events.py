"""Simulated time: callbacks in the order of their moments."""

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True)
class Clock:
    """The time of a simulation."""

    now_s: float = 0.0
    _due: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count)
    """Callbacks of one moment run in the order in which they were set."""

    def after(self, delay_s: float, callback: Callable[[], None]) -> None:
        """Run something later."""
        heapq.heappush(self._due, (self.now_s + delay_s, next(self._numbers), callback))

    def every(self, period_s: float, callback: Callable[[], None]) -> None:
        """Run something now and again and again."""

        def repeated() -> None:
            callback()
            self.after(period_s, repeated)

        self.after(0.0, repeated)

    def run(self, is_over: Callable[[], bool]) -> None:
        """Let time pass until something is over."""
        while self._due and not is_over():
            self.now_s, _, callback = heapq.heappop(self._due)
            callback()
