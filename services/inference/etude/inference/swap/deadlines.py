"""Time limits of a swap's phases, longer for larger models: a rank that exceeds one hangs."""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from etude.common.errors import UnavailableError

MIN_PAUSE_LIMIT_S = 5.0
"""Shortest limit: a swap in place takes milliseconds."""

MIN_CONCURRENT_LIMIT_S = 120.0
"""Shortest limit for work that runs concurrently with forward passes."""

MIN_PREPARE_BYTES_PER_S = 10 << 20
"""Slowest rate of preparing a version; one busy core reaches twenty times that."""

SLACK = 4.0
"""Writing a version is less work than preparing it; the host may be this much busier."""


FREEZE_LIMIT_S = 60.0
"""Longest wait for the running forward pass, and for the engine's answers; a long prompt on few
cores takes seconds."""

LIMIT_PARTS = 10
"""Parts that a limit is counted in: a process that was stopped meanwhile loses only one."""

_T = TypeVar("_T")


class HangsError(UnavailableError):
    """A call exceeded its time limit: the engine's state is unknown."""


@dataclass(slots=True)
class PhaseLimits:
    """Time limits from the measured duration of work that grows with the model."""

    map_s: float = 0.0
    """Duration of mapping the model and scanning all of it."""
    uses_loader: bool = False
    """True if changes are written through the model's loader, as when it was mapped."""
    _last_s: float = 0.0
    _longest_s: float = 0.0

    def record_prepare(self, took_s: float) -> None:
        """Record the duration of preparing a version."""
        self._last_s = took_s
        self._longest_s = max(self._longest_s, took_s)

    def prepare_limit_s(self, num_bytes: int) -> float:
        """Limit for preparing a version of this size, concurrently with forward passes."""
        loading_s = self.map_s if self.uses_loader else 0.0
        return MIN_CONCURRENT_LIMIT_S + num_bytes / MIN_PREPARE_BYTES_PER_S + SLACK * loading_s

    @property
    def scan_limit_s(self) -> float:
        """Limit for a scan of the whole model, concurrently with forward passes."""
        return MIN_CONCURRENT_LIMIT_S + SLACK * SLACK * self.map_s

    @property
    def write_limit_s(self) -> float:
        """Limit for writing the version that was prepared last."""
        return max(
            MIN_PAUSE_LIMIT_S, SLACK * (self._last_s + (self.map_s if self.uses_loader else 0.0))
        )

    @property
    def undo_limit_s(self) -> float:
        """Limit for undoing any version, or for a scan of the whole model."""
        return max(MIN_PAUSE_LIMIT_S, SLACK * (self._longest_s + self.map_s))


async def run_within(limit_s: float, work: Coroutine[Any, Any, _T], what: str) -> _T:
    """Result of a coroutine that ends within a time limit.

    Args:
        limit_s: for the work, in seconds.
        work: cancelled when the time is over, or with the caller.
        what: name of the work in the error text.

    Raises:
        HangsError: it did not end.
    """
    task = asyncio.create_task(work, name="swap-phase")
    try:
        for _ in range(LIMIT_PARTS):
            done, _ = await asyncio.wait({task}, timeout=limit_s / LIMIT_PARTS)
            if done:
                return await task
    finally:
        task.cancel()
    raise HangsError(f"{what} took over {limit_s:g} s")


async def run_to_end(swap: Coroutine[Any, Any, float]) -> float:
    """Run a swap to its end, even if the caller is cancelled."""
    task = asyncio.create_task(swap, name="swap-weights")
    await asyncio.wait({task})
    return await task
