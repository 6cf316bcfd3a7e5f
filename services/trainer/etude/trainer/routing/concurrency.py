"""Number of completions that a run has open at its engines, by their load. Pure.

It falls by a tenth when engines have too much, and rises slowly while they have room and all of it
is used: additive increase, multiplicative decrease.
"""

from collections.abc import Iterable
from typing import NamedTuple

QUEUED = 0.1
"""Waiting requests per running one, above which engines have too much."""
FULL, ROOMY = 0.9, 0.8
"""Shares of the KV cache above which they have too much, and below which they have room."""
CUT, RISE = 0.9, 0.02
USED = 0.9
"""Share of the limit that must be in use for it to rise."""


class EngineSample(NamedTuple):
    """Load of one engine, or of several together."""

    running: int
    waiting: int
    kv_cache_usage: float
    """Of the fullest engine, 0 to 1."""
    preemptions: int
    """New ones since the sample before."""


class ConcurrencyBounds(NamedTuple):
    """Least and most open completions."""

    least: int
    most: int

    def clamp(self, limit: int) -> int:
        """The nearest limit within the bounds."""
        return max(self.least, min(self.most, limit))


def join_samples(samples: Iterable[EngineSample]) -> EngineSample:
    """Load of several engines together."""
    found = list(samples)
    return EngineSample(
        running=sum(each.running for each in found),
        waiting=sum(each.waiting for each in found),
        kv_cache_usage=max((each.kv_cache_usage for each in found), default=0.0),
        preemptions=sum(each.preemptions for each in found),
    )


def next_limit(limit: int, load: EngineSample, bounds: ConcurrencyBounds) -> int:
    """The limit after a look at the engines.

    Args:
        limit: in force while the load was measured.
        load: of all engines of the run.
        bounds: of the limit.
    """
    if has_too_much(load):
        return bounds.clamp(min(limit - 1, int(CUT * limit)))
    has_room = load.waiting == 0 and load.kv_cache_usage < ROOMY
    if has_room and load.running >= USED * limit:
        return bounds.clamp(limit + max(1, int(RISE * limit)))
    return bounds.clamp(limit)


def has_too_much(load: EngineSample) -> bool:
    """True if engines queue, are full, or take room away from running requests."""
    return (
        load.waiting > QUEUED * load.running or load.kv_cache_usage > FULL or load.preemptions > 0
    )
