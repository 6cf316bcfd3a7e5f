"""Limits of one environment on its proxy: connections, token bucket of attempts, names, bytes."""

from dataclasses import dataclass, field

from etude.common.errors import EtudeError
from etude.common.token_bucket import TokenBucket

MAX_CONNECTIONS = 16
"""Concurrent connections; further ones wait to be accepted."""
ATTEMPTS_PER_S = 20.0
"""Rate beyond a burst; faster attempts wait, so that no environment fills the log."""
BURST = 200.0
"""pip and npm ask for a hundred packages in a row."""
MAX_NAMES = 256
"""Different hosts that one environment may have looked up: a name can carry data by itself."""
SPENT = "this environment has used up its bytes"


class OverLimitError(EtudeError):
    """An environment has used up its bytes in the middle of a transfer."""


@dataclass(slots=True)
class EgressAccount:
    """Usage of one environment so far."""

    max_bytes: int
    num_bytes: int = 0
    """In both directions."""
    _names: set[str] = field(default_factory=set)
    _attempts: TokenBucket = field(default_factory=lambda: TokenBucket.full(ATTEMPTS_PER_S, BURST))

    @property
    def is_spent(self) -> bool:
        """True once it may send and receive no more."""
        return self.num_bytes >= self.max_bytes

    def wait_s(self, now_s: float) -> float:
        """Take a token for the next attempt; returns the time to wait for it."""
        self._attempts = self._attempts.refill(now_s).take()
        return self._attempts.wait_s(0.0)

    def may_name(self, host: str) -> bool:
        """True if this host may be looked up; known hosts always may."""
        if host not in self._names and len(self._names) >= MAX_NAMES:
            return False
        self._names.add(host)
        return True

    def count_bytes(self, size: int) -> None:
        """Count bytes before they are passed on.

        Raises:
            OverLimitError: they are too many.
        """
        self.num_bytes += size
        if self.num_bytes > self.max_bytes:
            raise OverLimitError(SPENT)
