"""Transitions that failures, deadlines, stalls and budgets call for."""

from etude.common.api.kinds import RLRun
from etude.common.api.run.status import Failure, Intent
from etude.operator import names, pod_failures
from etude.operator.actions import Moment
from etude.operator.builders import run as desired
from etude.operator.clock import rfc3339
from etude.operator.pod_failures import PodFailure
from etude.operator.reasons import Reason
from etude.operator.runs import usage
from etude.operator.runs.lifecycle import failure_policy, limits, transitions
from etude.operator.runs.lifecycle.failure_policy import Outcome, Verdict
from etude.operator.runs.lifecycle.transitions import Undertaking
from etude.operator.runs.observe import Seen


def after_failure(run: RLRun, seen: Seen, now: Moment) -> Undertaking | None:
    """The transition for the gravest failure in the run's pods; None if none is needed."""
    attempts = transitions.attempts_of(run)
    rules = run.spec.failure_policy.listed
    awaited = failure_policy.conditions(rules)
    found = [
        failure
        for role in desired.roles(run)
        for failure in pod_failures.failures(
            role, pod_failures.of_attempt(seen.pods.get(role, ()), attempts.get(role, 0)), awaited
        )
    ]
    judged = failure_policy.gravest(found, rules, has_begun=run.status.step is not None)
    if judged is None:
        return None
    failure, verdict = judged
    noted = _noted(failure, now)
    if verdict == Verdict(Outcome.FAIL):
        message = f"{failure.pod} refused to start: {failure.message}"
        return Undertaking(
            transitions.intent(run, "Fail", Reason.INVALID_SPEC, message, now), noted
        )
    code = failure.exit_code
    what = f"ended with exit code {code}" if code is not None else f"has {failure.reason}"
    sentence = f"{failure.pod} {what}"
    return Undertaking(
        _following(run, verdict, failure.role, Reason.ROLE_FAILED, sentence, now), noted
    )


def after_deadline(run: RLRun, seen: Seen, now: Moment) -> Undertaking | None:
    """The failure of a run that crossed one of its deadlines; None before that."""
    if any(left <= 0 for left in limits.deadlines_left_s(run, seen, now)):
        given = run.spec.deadlines.model_dump(by_alias=True, exclude_none=True)
        words = ", ".join(f"{name} {value}" for name, value in given.items())
        message = f"the run has held pods for {limits.active_s(run, now.wall_s):.0f} s: {words}"
        return Undertaking(transitions.intent(run, "Fail", Reason.DEADLINE_EXCEEDED, message, now))
    return None


def after_stall(run: RLRun, seen: Seen, now: Moment) -> Undertaking | None:
    """The transition for a run that makes no progress; None while it does."""
    report = seen.report
    left = limits.progress_left_s(run, seen, now)
    if left is not None and left <= 0 and report.status is not None:
        message = f"nothing was finished for {limits.progress_limit_s(run, report.status):.0f} s"
        verdict = failure_policy.stalled(run.spec.failure_policy.listed)
        if verdict.outcome is not Outcome.IGNORE:
            return Undertaking(
                _following(run, verdict, names.TRAINER, Reason.NO_PROGRESS, message, now)
            )
    return None


def after_budget(run: RLRun, now: Moment) -> Undertaking | None:
    """The suspension of a run whose budget is spent; None before that."""
    left_s = usage.left_s(run, now)
    if left_s is None or left_s > 0:
        return None
    message = f"{usage.spent(run, now)} is spent; raise it to go on"
    return Undertaking(transitions.intent(run, "Suspend", Reason.BUDGET_EXCEEDED, message, now))


def _following(
    run: RLRun, verdict: Verdict, role: str, reason: str, message: str, now: Moment
) -> Intent:
    """The intent that carries out a verdict.

    Args:
        run: the run.
        verdict: any but IGNORE.
        role: the role that failed.
        reason: of a restart.
        message: a sentence about the failure.
        now: both clocks.

    Raises:
        ValueError: the verdict is IGNORE.
    """
    by_rule = f"{message}: failurePolicy.rules[{verdict.rule}] applies"
    match verdict.outcome:
        case Outcome.FAIL:
            return transitions.intent(run, "Fail", Reason.FAILURE_RULE, by_rule, now)
        case Outcome.SUSPEND:
            return transitions.intent(run, "Suspend", Reason.FAILURE_RULE, by_rule, now)
        case Outcome.RESTART_RUN:
            return transitions.restart(run, "", reason, message, now)
        case Outcome.RESTART_ROLE:
            return transitions.restart(run, role, reason, message, now)
        case Outcome.IGNORE:
            raise ValueError("FailureOutcome.IGNORE has no intent")


def _noted(failure: PodFailure, now: Moment) -> Failure:
    return Failure(
        time=rfc3339(now.wall_s),
        role=failure.role,
        pod=failure.pod,
        reason=failure.reason[:64],
        exit_code=failure.exit_code,
        message=failure.message[-1024:],
    )
