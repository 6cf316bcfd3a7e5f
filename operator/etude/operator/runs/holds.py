"""Whether the operator itself keeps a run suspended, and until when."""

from etude.common.api.kinds import RLRun
from etude.common.api.status import Hold, Intent
from etude.operator import names
from etude.operator.actions import Moment
from etude.operator.reasons import Reason
from etude.operator.runs import usage

OURS = {Reason.BUDGET_EXCEEDED, Reason.FAILURE_RULE, Reason.GATE_NOT_MET}
"""Reasons to suspend a run that its spec wants to run."""


def begun(intent: Intent) -> Hold | None:
    """What keeps a run suspended from an intent on; None for what its spec asks for."""
    if intent.type != "Suspend" or intent.reason not in OURS:
        return None
    return Hold(reason=intent.reason, message=intent.message, since=intent.since)


def kept(run: RLRun, now: Moment) -> Hold | None:
    """The hold, unless its cause is gone.

    A user who suspends the run too takes it over: from then on it resumes as the spec says. An
    annotation with the time of the hold overrules it too, and no later one.
    """
    hold = run.status.hold
    if hold is None or run.spec.suspend:
        return None
    if run.metadata.annotations.get(names.RESUME) == hold.since:
        return None
    left_s = usage.left_s(run, now)
    if hold.reason == Reason.BUDGET_EXCEEDED and (left_s is None or left_s > 0):
        return None
    return hold


def asks_for_pods(run: RLRun) -> bool:
    """Whether a run that is not over, and about which nothing is undertaken, should hold pods."""
    return not run.spec.suspend and run.status.hold is None
