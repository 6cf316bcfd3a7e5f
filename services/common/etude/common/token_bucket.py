"""Token bucket: limits a rate, with bursts."""

from dataclasses import dataclass, replace
from typing import Self


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBucket:
    """Tokens of one rate limit on its caller's clock."""

    rate_per_s: float
    """Tokens that come back each second."""
    burst: float
    """Tokens of a full bucket."""
    tokens: float
    """Tokens at the time of the last refill; negative where more were spent."""
    at_s: float
    """Time of the last refill."""

    @classmethod
    def full(cls, rate_per_s: float, burst: float, *, at_s: float = 0.0) -> Self:
        return cls(rate_per_s=rate_per_s, burst=burst, tokens=burst, at_s=at_s)

    def refill(self, now_s: float) -> Self:
        """Add the tokens of the time since the last refill; a clock that is set back adds none."""
        earned = self.rate_per_s * max(0.0, now_s - self.at_s)
        tokens = min(self.burst, self.tokens + earned)
        return replace(self, tokens=tokens, at_s=max(now_s, self.at_s))

    def take(self, cost: float = 1.0) -> Self:
        """Spend tokens; the bucket may be overdrawn."""
        return replace(self, tokens=self.tokens - cost)

    def wait_s(self, cost: float = 1.0) -> float:
        """Seconds until the bucket has the tokens of a cost, without regard to its capacity."""
        return max(0.0, cost - self.tokens) / self.rate_per_s
