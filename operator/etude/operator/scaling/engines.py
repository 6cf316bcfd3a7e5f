"""How many engines let a step take the time that it should."""

import math
from typing import NamedTuple

TOLERANCE = 0.1
"""A need within a tenth of what there is changes nothing: steps are never equally long."""
PACE = 2
"""At most twice as many, or half, at a time: one odd step must not take every GPU."""


class Bounds(NamedTuple):
    """What is asked for."""

    least: int
    most: int
    step_s: float
    """What a step should take."""


class Signals(NamedTuple):
    """The newest steps, smoothed."""

    tokens: float
    """Sampled for a step."""
    wait_s: float
    """For which the step waited for them."""
    work_s: float
    """For everything else in a step."""
    engines: int
    """That sampled them."""


def wanted(signals: Signals, bounds: Bounds, present: int) -> int:
    """How many engines there should be.

    N = ceil(tokens per step / (tokens per second of an engine x seconds for sampling)), where what
    is not sampling is taken off the target. What an engine gives is tokens / (wait x engines): time
    in which engines idle beside a trainer that works says nothing about them. The next steps are
    expected to sample as much as the newest ones, so the tokens cancel.

    Args:
        signals: without figures there is no decision.
        bounds: the target, and the limits that hold in any case.
        present: engines wanted so far.
    """
    if signals.tokens <= 0 or signals.wait_s <= 0 or signals.engines <= 0:
        return _within(present, bounds)
    room_s = bounds.step_s - signals.work_s
    if room_s <= 0:
        return _within(PACE * present, bounds)
    need = signals.engines * signals.wait_s / room_s
    if abs(need / present - 1) <= TOLERANCE:
        return _within(present, bounds)
    # Rounding noise in need must not cost an engine.
    count = math.ceil(round(min(need, PACE * present), 6))
    return _within(max(count, math.ceil(present / PACE)), bounds)


def _within(count: int, bounds: Bounds) -> int:
    return max(bounds.least, min(count, bounds.most))
