"""Holds: suspensions of a run by the operator itself, and their end."""

from etude.common.api.kinds import RLRun
from etude.common.api.run.status import Hold, Intent
from etude.operator import names
from etude.operator.actions import ClockReading
from etude.operator.reasons import Reason
from etude.operator.runs.lifecycle import limits

REPORTED_REASONS = {Reason.GATE_NOT_MET, Reason.MONITOR_FROZE}
"""Reasons with which the controller of a run asks for its suspension."""
HOLD_REASONS = {Reason.BUDGET_EXCEEDED, Reason.FAILURE_RULE, *REPORTED_REASONS}
"""Reasons for which the operator suspends a run whose spec does not."""


def hold_of(intent: Intent) -> Hold | None:
    """The hold that an intent starts; None for a suspension by the user."""
    if intent.type != "Suspend" or intent.reason not in HOLD_REASONS:
        return None
    return Hold(reason=intent.reason, message=intent.message, since=intent.since)


def current_hold(run: RLRun, now: ClockReading) -> Hold | None:
    """The present hold; None once its cause is gone.

    A user who suspends the run too takes the hold over: from then on spec.suspend decides. An
    annotation with the time of the hold overrules this hold, and no later one.
    """
    hold = run.status.hold
    if hold is None or run.spec.suspend:
        return None
    if run.metadata.annotations.get(names.RESUME) == hold.since:
        return None
    left_s = limits.budget_left_s(run, now)
    if hold.reason == Reason.BUDGET_EXCEEDED and (left_s is None or left_s > 0):
        return None
    return hold


def wants_pods(run: RLRun) -> bool:
    """An unfinished run without an intent should hold pods."""
    return not run.spec.suspend and run.status.hold is None
