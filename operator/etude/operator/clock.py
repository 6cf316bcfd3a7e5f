"""Time as a parameter: wall time to show, monotonic time to decide."""

import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol

from typing_extensions import override


class Clock(Protocol):
    """Both kinds of time, in seconds."""

    def wall_s(self) -> float: ...
    def monotonic_s(self) -> float: ...


@dataclass(slots=True)
class SystemClock(Clock):
    """The machine's own clocks."""

    @override
    def wall_s(self) -> float:
        return time.time()

    @override
    def monotonic_s(self) -> float:
        return time.monotonic()


@dataclass(slots=True)
class ManualClock(Clock):
    """Stands still until it is moved, for tests."""

    now_s: float = 1_700_000_000.0
    set_by_s: float = 0.0
    """How far the wall clock was set by hand."""

    @override
    def wall_s(self) -> float:
        return self.now_s + self.set_by_s

    @override
    def monotonic_s(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now_s += seconds


def rfc3339(wall_s: float) -> str:
    """Seconds since 1970 as Kubernetes writes them."""
    return datetime.fromtimestamp(int(wall_s), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def seconds(text: str) -> float:
    """An RFC 3339 time as seconds since 1970."""
    return datetime.fromisoformat(text).timestamp()
