"""Token bucket: limits a rate, with bursts."""

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class Bucket:
    """A token bucket on its caller's clock."""

    rate_per_s: float
    """Tokens that come back each second."""
    burst: float
    """Tokens of a full bucket."""
    counted_s: float
    """Time of the last count."""
    spent: float = 0.0
    """Tokens missing from a full bucket."""

    def wait_s(self, now_s: float) -> float:
        """Seconds until the next token; 0 if there is one."""
        self.spent = max(0.0, self.spent - (now_s - self.counted_s) * self.rate_per_s)
        self.counted_s = now_s
        return max(0.0, (self.spent + 1 - self.burst) / self.rate_per_s)

    def take(self) -> None:
        """Spend a token."""
        self.spent += 1
