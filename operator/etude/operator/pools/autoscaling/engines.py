"""Engine count for a target step time."""

import math
from typing import NamedTuple

TOLERANCE = 0.1
"""A need within a tenth of what there is changes nothing: steps are never equally long."""
PACE = 2
"""At most twice as many, or half, at a time: one odd step must not take every GPU."""


class Bounds(NamedTuple):
    """Target and limits of the engine count."""

    least: int
    most: int
    step_s: float
    """Target time of a step."""


class Signals(NamedTuple):
    """Smoothed figures of the newest steps."""

    tokens: float
    """Tokens sampled for a step."""
    wait_s: float
    """Time that the step waited for them."""
    work_s: float
    """Time of everything else in a step."""
    engines: int
    """Engines that sampled them."""


def wanted(signals: Signals, bounds: Bounds, present: int) -> int:
    """Engines for the target step time.

    N = ceil(tokens per step / (tokens per second of an engine x seconds for sampling)), where the
    seconds for sampling are the target less the other work. An engine gives tokens / (wait x
    engines): idle engines during the trainer's work do not count. The next steps are expected to
    sample as much as the newest ones, so the tokens cancel.

    Args:
        signals: of the newest steps; without figures the count stays.
        bounds: target and limits.
        present: engines desired so far.
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
