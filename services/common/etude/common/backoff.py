"""Retry with exponential backoff: delays that double up to a limit."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Backoff:
    """The delays between the attempts of one caller; reset() after a success."""

    first_s: float
    longest_s: float
    delay_s: float = field(init=False)
    """Delay before the next attempt."""

    def __post_init__(self) -> None:
        self.delay_s = self.first_s

    def next_s(self) -> float:
        """The present delay; the next one is twice as long, up to the longest."""
        delay_s = self.delay_s
        self.delay_s = min(2 * delay_s, self.longest_s)
        return delay_s

    def reset(self) -> None:
        """Start again with the first delay."""
        self.delay_s = self.first_s
