"""A clock for one process as if its core were its own: work takes CPU time, waiting takes none."""

import asyncio
import selectors
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from typing_extensions import override


class CoreClock:
    """CPU time of this process, and what it would have slept."""

    def __init__(self) -> None:
        self._skipped_s = 0.0

    def __call__(self) -> float:
        return time.process_time() + self._skipped_s

    def skip(self, seconds: float) -> None:
        """Instead of sleeping."""
        self._skipped_s += seconds


class SkippingSelector(selectors.SelectSelector):
    """Never waits: there is nothing outside of the process to wait for."""

    def __init__(self, clock: CoreClock) -> None:
        super().__init__()
        self._clock = clock

    @override
    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(0)
        if not found and timeout:
            self._clock.skip(timeout)
        return found


@contextmanager
def core_time() -> Iterator[asyncio.Runner]:
    """Run coroutines by that clock; time.monotonic() follows it meanwhile.

    On a machine that others use too, wall time measures them.
    """
    clock, real = CoreClock(), time.monotonic
    loop: Any = asyncio.SelectorEventLoop(SkippingSelector(clock))
    time.monotonic = clock
    try:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            yield runner
    finally:
        time.monotonic = real
