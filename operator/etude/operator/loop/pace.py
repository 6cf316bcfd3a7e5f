"""How often something may be done: many times at once now and then, rarely in the long run."""

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class Bucket:
    """A token bucket on a clock of its user's."""

    rate_per_s: float
    """In the long run."""
    burst: float
    """At once, after a rest."""
    counted_s: float
    """When the tokens were counted last."""
    spent: float = 0.0
    """Tokens that are missing from a full bucket."""

    def wait_s(self, now_s: float) -> float:
        """Seconds until the next token; 0 if there is one."""
        self.spent = max(0.0, self.spent - (now_s - self.counted_s) * self.rate_per_s)
        self.counted_s = now_s
        return max(0.0, (self.spent + 1 - self.burst) / self.rate_per_s)

    def take(self) -> None:
        """Use a token up."""
        self.spent += 1
