"""What a warm pool of one template should do next."""

from dataclasses import dataclass, replace
from enum import Enum

FEWEST, MOST = 2, 64
"""Shells that are kept once they are wanted at all, and however much they are wanted."""
REST_S = 60.0
"""A watermark that nobody reached for so long is halved."""
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.25, 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What is wanted in stock."""

    paused: int = 0
    """Paused clones, which cost memory and answer in milliseconds."""
    shells: int = 0
    """Shells that are there also when nobody asked for long."""
    max_shells: int = 0
    """How far their number may grow by itself while saved states are taken up faster than they are
    made."""

    def __post_init__(self) -> None:
        if self.paused < 0:
            raise ValueError(f"paused must not be negative, got {self.paused}")
        if not 0 <= self.shells <= self.max_shells <= MOST:
            raise ValueError(
                f"shells {self.shells} and max_shells {self.max_shells} must be in this order,"
                f" from 0 to {MOST}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Watermark:
    """How many shells are kept, from how fast they went."""

    shells: int = 0
    since_s: float = 0.0
    """When it was last reached for, or halved; on any clock that only goes forward."""

    def taken(self, target: Target, *, is_drained: bool, now_s: float) -> "Watermark":
        """After a start, which found no shell any more if the stock is drained."""
        kept = max(self.shells, target.shells)
        grown = max(FEWEST, 2 * kept) if is_drained else kept
        return Watermark(shells=min(grown, target.max_shells), since_s=now_s)

    def rested(self, target: Target, *, now_s: float) -> "Watermark":
        """After a time in which nothing was taken."""
        kept = min(max(self.shells, target.shells), target.max_shells)
        since_s = self.since_s
        while kept > target.shells and now_s - since_s >= REST_S:
            kept, since_s = max(kept // 2, target.shells), since_s + REST_S
        return Watermark(shells=kept, since_s=since_s)

    def next_s(self, target: Target) -> float | None:
        """When it may fall next; None if it is as low as it gets."""
        return self.since_s + REST_S if self.shells > target.shells else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """How long to leave a failing refill alone."""

    failures: int = 0
    """In a row."""
    until_s: float = 0.0

    def failed(self, *, now_s: float) -> "Backoff":
        """After one more: twice as long as before."""
        delay_s = min(_FIRST_DELAY_S * 2**self.failures, _LONGEST_DELAY_S)
        # More would change nothing, and numbers end.
        return replace(self, failures=min(self.failures + 1, 32), until_s=now_s + delay_s)


class Step(Enum):
    """One change of the stock."""

    MAKE_PAUSED = "make a paused clone"
    MAKE_SHELL = "make a shell"
    DROP_PAUSED = "drop a paused clone"
    DROP_SHELL = "drop a shell"


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What is in stock."""

    paused: int
    shells: int


def step(held: Held, target: Target, watermark: Watermark) -> Step | None:
    """The next change, or None where the stock is as it should be.

    Memory is given back before more is taken, and paused clones come before shells: each saves
    whoever takes it more.
    """
    if held.paused > target.paused:
        return Step.DROP_PAUSED
    if held.shells > watermark.shells:
        return Step.DROP_SHELL
    if held.paused < target.paused:
        return Step.MAKE_PAUSED
    if held.shells < watermark.shells:
        return Step.MAKE_SHELL
    return None
