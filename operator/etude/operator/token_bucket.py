"""Token bucket: limits a rate, with bursts."""

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class TokenBucket:
    """A token bucket on its caller's clock."""

    rate_per_s: float
    """Tokens that come back each second."""
    burst: float
    """Tokens of a full bucket."""
    updated_s: float
    """Time of the last count."""
    missing: float = 0.0
    """Tokens missing from a full bucket."""

    def wait_s(self, now_s: float) -> float:
        """Seconds until the next token; 0 if there is one."""
        self.missing = max(0.0, self.missing - (now_s - self.updated_s) * self.rate_per_s)
        self.updated_s = now_s
        return max(0.0, (self.missing + 1 - self.burst) / self.rate_per_s)

    def take(self) -> None:
        """Spend a token."""
        self.missing += 1
