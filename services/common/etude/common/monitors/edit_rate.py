"""Monitor: a policy edits much more or much less than before."""

import statistics

from etude.common.monitors.share import WINDOWS
from etude.common.monitors.significance import Z_LIMIT, Ratio
from etude.common.monitors.window import (
    FEWEST_ROLLOUTS,
    FEWEST_WINDOWS,
    Action,
    Finding,
    Monitor,
    Reference,
    Window,
)

DRIFT = 0.2
"""Largest change of either figure, as a share of the reference, in both directions."""
_FEWEST_IDLE = 0.05
"""A share of rollouts without an edit up to this is nearly nothing."""


def check(window: Window, reference: Reference) -> Finding | None:
    """Edits per rollout, and share of rollouts without one, compared with their medians."""
    if len(window.rollouts) < FEWEST_ROLLOUTS or len(reference) < FEWEST_WINDOWS:
        return None
    newest = reference[-WINDOWS:]
    edits = _edits(window)
    usual = statistics.median(_edits(each).value for each in newest)
    idle = _idle(window)
    usual_idle = max(_FEWEST_IDLE, statistics.median(_idle(each).value for each in newest))
    is_idle_enough = max(idle.value, usual_idle) > _FEWEST_IDLE
    return Finding(
        monitor="EditRate",
        figure=edits.value / usual - 1 if usual else 0.0,
        limit=DRIFT,
        is_raised=_has_drifted(edits, usual) or (is_idle_enough and _has_drifted(idle, usual_idle)),
        action=Action.WARN,
        sentence=f"{edits.value:.2f} edits per rollout, against {usual:.2f} before;"
        f" {idle.value:.1%} without an edit, against {usual_idle:.1%}",
    )


def _has_drifted(ratio: Ratio, usual: float) -> bool:
    is_far = abs(ratio.value - usual) > DRIFT * usual
    return is_far and abs(ratio.z_score(usual)) > Z_LIMIT


def _edits(window: Window) -> Ratio:
    edits = [float(r.edits) for r in window.rollouts if not r.is_masked]
    return Ratio(edits, [1.0] * len(edits))


def _idle(window: Window) -> Ratio:
    idle = [float(r.edits == 0) for r in window.rollouts if not r.is_masked]
    return Ratio(idle, [1.0] * len(idle))


MONITOR = Monitor("EditRate", check)
