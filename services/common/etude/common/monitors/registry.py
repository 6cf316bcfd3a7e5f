"""Registry of monitors, and the evaluation of a window by all of them."""

from collections.abc import Sequence

from etude.common.monitors import (
    canaries,
    deferral,
    drift,
    edit_rate,
    held_out_score,
    hidden_gap,
    judge_gap,
    share,
)
from etude.common.monitors.window import Action, Finding, Monitor, Reference, Window

MONITORS: Sequence[Monitor] = (
    share.BROKEN_CALLS,
    deferral.MONITOR,
    edit_rate.MONITOR,
    share.MASKED_SHARE,
    hidden_gap.MONITOR,
    held_out_score.MONITOR,
    judge_gap.MONITOR,
    drift.LENGTH,
    drift.ENTROPY,
    canaries.MONITOR,
)
"""All monitors; a new one is a module and a line here."""


def evaluate_window(window: Window, reference: Reference) -> list[Finding]:
    """Findings of all monitors that have enough data, raised or not. Pure.

    Args:
        window: the new batch or production window.
        reference: earlier ones without raised findings, oldest first: a window with one must not
            become usual.
    """
    found = (monitor.check(window, reference) for monitor in MONITORS)
    return [each for each in found if each is not None]


def penalise(rewards: Sequence[float], findings: Sequence[Finding], *, floor: float) -> list[float]:
    """Rewards in which rollouts to be penalised have at most the floor; the batch stays whole.

    Removed rollouts would teach nothing, and so make the hack free.
    """
    hacked = {
        place
        for each in findings
        if each.is_raised and each.action is Action.PENALISE
        for place in each.rollouts
    }
    return [min(reward, floor) if i in hacked else reward for i, reward in enumerate(rewards)]
