"""Monitor: rollouts become much longer or shorter, or the policy much surer."""

import math
import statistics
from collections.abc import Callable

from etude.common.monitors.share import WINDOWS
from etude.common.monitors.window import (
    FEWEST_ROLLOUTS,
    FEWEST_WINDOWS,
    Action,
    Finding,
    Monitor,
    Reference,
    RolloutFacts,
    Window,
)

LENGTH_LIMIT = 1.5
"""Largest geometric mean of a rollout's tokens, as a multiple of the reference or its inverse."""
ENTROPY_LIMIT = 2.0
"""Largest mean entropy, as a multiple of the reference or its inverse."""
_ERRORS = 3.5


def check_length(window: Window, reference: Reference) -> Finding | None:
    """Geometric mean of tokens per rollout over the median of the reference."""
    return _check("LengthDrift", _log_tokens, LENGTH_LIMIT, window, reference)


def check_entropy(window: Window, reference: Reference) -> Finding | None:
    """Geometric mean of entropy per sampled token over the median of the reference."""
    return _check("EntropyDrift", _log_entropy, ENTROPY_LIMIT, window, reference)


def _check(
    name: str,
    measure: Callable[[RolloutFacts], float | None],
    limit: float,
    window: Window,
    reference: Reference,
) -> Finding | None:
    values = _measure(measure, window)
    earlier = [found for each in reference[-WINDOWS:] if (found := _measure(measure, each))]
    if len(values) < FEWEST_ROLLOUTS or len(earlier) < FEWEST_WINDOWS:
        return None
    change = statistics.fmean(values) - statistics.median(map(statistics.fmean, earlier))
    error = statistics.stdev(values) / math.sqrt(len(values))
    multiple = math.exp(min(50.0, change))
    return Finding(
        monitor=name,
        figure=multiple,
        limit=limit,
        is_raised=abs(change) > math.log(limit) and abs(change) > _ERRORS * error,
        action=Action.WARN,
        sentence=f"{multiple:.3g} times the usual",
    )


def _measure(measure: Callable[[RolloutFacts], float | None], window: Window) -> list[float]:
    return [found for facts in window.rollouts if (found := measure(facts)) is not None]


def _log_tokens(facts: RolloutFacts) -> float | None:
    return math.log(facts.tokens) if facts.tokens else None


def _log_entropy(facts: RolloutFacts) -> float | None:
    return math.log(facts.entropy) if facts.entropy else None


LENGTH = Monitor("LengthDrift", check_length)
ENTROPY = Monitor("EntropyDrift", check_entropy)
