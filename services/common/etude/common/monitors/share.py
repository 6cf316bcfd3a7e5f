"""Monitors of shares that should be small: broken calls, which end hard tasks, and masked rollouts.

A policy that provokes platform faults removes its failures from the batch.
"""

import statistics
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from etude.common.monitors.significance import Z_LIMIT, Ratio, correlation_z_score
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

GROWTH = 1.5
"""Largest share, as a multiple of the median of the reference."""
CORRELATION = 0.3
"""Largest correlation of the share with the difficulty of tasks."""
WINDOWS = 7


class ShareLimits(NamedTuple):
    """Words and limits of one share."""

    name: str
    subject: str
    floor: float
    """Smallest share that the median counts as: half of nothing is nothing."""


def _check_share(
    limits: ShareLimits,
    measure: Callable[[Window], Ratio],
    window: Window,
    reference: Reference,
) -> Finding | None:
    """Raise a share that grew by half, or that goes with the difficulty of tasks.

    Both must be significant: z > 3.5 over the median, with rollouts as units, or over the largest
    correlation, with groups as units.
    """
    if len(window.rollouts) < FEWEST_ROLLOUTS or len(reference) < FEWEST_WINDOWS:
        return None
    ratio = measure(window)
    median = statistics.median(measure(each).value for each in reference[-WINDOWS:])
    usual = max(limits.floor, median)
    has_grown = ratio.value > GROWTH * usual and ratio.z_score(usual) > Z_LIMIT
    is_for_hard_tasks = _difficulty_z_score(ratio, window) > Z_LIMIT
    sentence = f"{ratio.value:.1%} {limits.subject}, against {median:.1%} before"
    if is_for_hard_tasks:
        sentence += f"; they are on hard tasks (correlation above {CORRELATION})"
    return Finding(
        monitor=limits.name,
        figure=ratio.value,
        limit=GROWTH * usual,
        is_raised=has_grown or is_for_hard_tasks,
        action=Action.FREEZE,
        sentence=sentence,
    )


def _difficulty_z_score(ratio: Ratio, window: Window) -> float:
    """Of the means of groups: siblings share a task, so that they are no units."""
    groups: dict[str, list[tuple[float, float]]] = {}
    rows = zip(ratio.numerators, ratio.denominators, window.rollouts, strict=True)
    for place, (y, x, facts) in enumerate(rows):
        if x and facts.difficulty is not None:
            key = facts.group or f"\0{place}"
            groups.setdefault(key, []).append((y / x, facts.difficulty))
    shares, difficulties = (
        [statistics.fmean(pair[column] for pair in pairs) for pairs in groups.values()]
        for column in (0, 1)
    )
    return correlation_z_score(shares, difficulties, limit=CORRELATION)


def _broken_share(window: Window) -> Ratio:
    return Ratio([r.broken_calls for r in window.rollouts], [r.calls for r in window.rollouts])


def _masked_share(window: Window) -> Ratio:
    return Ratio([float(r.is_masked) for r in window.rollouts], [1.0] * len(window.rollouts))


def _has_broken_call(facts: RolloutFacts, reference: Reference) -> bool:
    return facts.broken_calls > 0


_BROKEN = ShareLimits(name="BrokenCalls", subject="of the tool calls are broken", floor=0.005)
_MASKED = ShareLimits(name="MaskedShare", subject="of the rollouts are masked", floor=0.01)

BROKEN_CALLS = Monitor(
    _BROKEN.name, partial(_check_share, _BROKEN, _broken_share), _has_broken_call
)
MASKED_SHARE = Monitor(_MASKED.name, partial(_check_share, _MASKED, _masked_share))
