"""Clocks: wall time for display, monotonic time for decisions."""

import contextlib
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Protocol

from typing_extensions import override


class Clock(Protocol):
    """Both kinds of time, in seconds."""

    def wall_s(self) -> float: ...
    def monotonic_s(self) -> float: ...


@dataclass(slots=True)
class SystemClock(Clock):
    """The clocks of this computer."""

    @override
    def wall_s(self) -> float:
        return time.time()

    @override
    def monotonic_s(self) -> float:
        return time.monotonic()


@dataclass(slots=True)
class ServerClock(Clock):
    """The API server's wall time, which all replicas share.

    It is read once and then advanced by the local monotonic clock, so that setting a clock does not
    end a deadline of a run.
    """

    _offset_s: float | None = None
    """Offset from the monotonic clock; unknown before the first answer."""

    @override
    def wall_s(self) -> float:
        return time.time() if self._offset_s is None else time.monotonic() + self._offset_s

    @override
    def monotonic_s(self) -> float:
        return time.monotonic()

    def set_from_header(self, date: str | None) -> None:
        """Take over the Date header of an answer; only the first one counts."""
        if self._offset_s is None and date is not None:
            with contextlib.suppress(ValueError):  # an invalid header is ignored
                self._offset_s = parsedate_to_datetime(date).timestamp() - time.monotonic()


@dataclass(slots=True)
class ManualClock(Clock):
    """A clock that tests advance."""

    now_s: float = 1_700_000_000.0
    offset_s: float = 0.0
    """Offset of a wall clock that was set by hand."""

    @override
    def wall_s(self) -> float:
        return self.now_s + self.offset_s

    @override
    def monotonic_s(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


def rfc3339(wall_s: float) -> str:
    """Seconds since 1970 as Kubernetes writes them."""
    return datetime.fromtimestamp(int(wall_s), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def rfc3339_micro(wall_s: float) -> str:
    """Seconds since 1970 with microseconds, as in Leases and Events."""
    return datetime.fromtimestamp(wall_s, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def parse_rfc3339(text: str) -> float:
    """An RFC 3339 time as seconds since 1970."""
    return datetime.fromisoformat(text).timestamp()
