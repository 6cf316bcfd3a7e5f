"""Warm pool levels: watermark of idle VMMs, refill backoff, next change. Pure."""

from dataclasses import dataclass, replace
from enum import Enum

FEWEST, MOST = 2, 64
"""Least idle VMMs once they are wanted, and most in any case."""
REST_S = 60.0
"""A watermark is halved after this time without a take."""
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.25, 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmPoolTarget:
    """Target of one template's warm pool."""

    paused: int = 0
    """Paused clones: cost memory, answer in milliseconds."""
    shells: int = 0
    """Idle VMMs that are kept without demand."""
    max_shells: int = 0
    """Limit of idle VMMs when saved states are restored faster than VMMs are started."""

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
    """Number of idle VMMs to keep, from the rate at which they are taken."""

    shells: int = 0
    since_s: float = 0.0
    """Time of the last take or halving, on any monotonic clock."""

    def after_take(self, target: WarmPoolTarget, *, is_drained: bool, now_s: float) -> "Watermark":
        """Raise the level after a start; a drained pool found no idle VMM for it."""
        kept = max(self.shells, target.shells)
        grown = max(FEWEST, 2 * kept) if is_drained else kept
        return Watermark(shells=min(grown, target.max_shells), since_s=now_s)

    def after_rest(self, target: WarmPoolTarget, *, now_s: float) -> "Watermark":
        """Lower the level after a time without takes."""
        kept = min(max(self.shells, target.shells), target.max_shells)
        since_s = self.since_s
        while kept > target.shells and now_s - since_s >= REST_S:
            kept, since_s = max(kept // 2, target.shells), since_s + REST_S
        return Watermark(shells=kept, since_s=since_s)

    def next_s(self, target: WarmPoolTarget) -> float | None:
        """Time of the next halving; None at the target."""
        return self.since_s + REST_S if self.shells > target.shells else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RefillBackoff:
    """Exponential backoff of failing refills."""

    failures: int = 0
    """Consecutive failures."""
    until_s: float = 0.0

    def failed(self, *, now_s: float) -> "RefillBackoff":
        """Double the delay after one more failure."""
        delay_s = min(_FIRST_DELAY_S * 2**self.failures, _LONGEST_DELAY_S)
        # Bounded: the delay is at its limit long before.
        return replace(self, failures=min(self.failures + 1, 32), until_s=now_s + delay_s)


class WarmPoolStep(Enum):
    """One change of the pool."""

    MAKE_PAUSED = "make a paused clone"
    MAKE_SHELL = "make a shell"
    DROP_PAUSED = "drop a paused clone"
    DROP_SHELL = "drop a shell"


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmPoolLevel:
    """Present content of a pool."""

    paused: int
    shells: int


def next_step(
    held: WarmPoolLevel, target: WarmPoolTarget, watermark: Watermark
) -> WarmPoolStep | None:
    """Decide the next change of the pool, or None at the target.

    Memory is freed before more is taken, and paused clones come before idle VMMs, since they save
    more time.
    """
    if held.paused > target.paused:
        return WarmPoolStep.DROP_PAUSED
    if held.shells > watermark.shells:
        return WarmPoolStep.DROP_SHELL
    if held.paused < target.paused:
        return WarmPoolStep.MAKE_PAUSED
    if held.shells < watermark.shells:
        return WarmPoolStep.MAKE_SHELL
    return None
