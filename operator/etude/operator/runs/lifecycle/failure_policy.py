"""Failure policy of a run. It answers: why did its pods go?

A pod failure gets a verdict: of the first matching rule in spec.failurePolicy, else a default. A
failure, a deadline, a stall or a spent budget becomes a transition, whose intent (restart, suspend,
fail) is recorded in the run's status with its reason and message, then carried out by
runs/decide.py. Evictions by a queue and suspensions by the user are in runs/lifecycle/intents.py.
"""

from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import NamedTuple

from etude.common.api.kinds import RLRun
from etude.common.api.run.lifecycle import Cause, FailureAction, FailureRule
from etude.common.api.run.status import Failure, Intent
from etude.common.process import EXIT_TRY_AGAIN
from etude.operator import names, pod_failures
from etude.operator.actions import ClockReading
from etude.operator.builders import run_spec
from etude.operator.clock import rfc3339
from etude.operator.pod_failures import CONFIGURATION_EXITS, PodFailure
from etude.operator.reasons import Reason
from etude.operator.runs.lifecycle import limits, transitions
from etude.operator.runs.lifecycle.transitions import RunTransition
from etude.operator.runs.observe import ObservedRun

RESTARTS_IN_PLACE = 5
"""The kubelet restarts engines and rewards in place this often before their pods are replaced."""


class FailureOutcome(IntEnum):
    """The outcome of a failure; of several failures the gravest outcome decides."""

    IGNORE = 0
    """The kubelet or the StatefulSet repairs it."""
    RESTART_ROLE = 1
    """The role restarts as the next attempt."""
    RESTART_RUN = 2
    """Every role restarts."""
    SUSPEND = 3
    """A checkpoint, then the pods are released until a user resumes the run."""
    FAIL = 4
    """The run is over."""


_OUTCOMES = {
    FailureAction.IGNORE: FailureOutcome.IGNORE,
    FailureAction.RESTART_ROLE: FailureOutcome.RESTART_ROLE,
    FailureAction.RESTART_RUN: FailureOutcome.RESTART_RUN,
    FailureAction.CHECKPOINT_AND_SUSPEND: FailureOutcome.SUSPEND,
    FailureAction.FAIL_RUN: FailureOutcome.FAIL,
}


class FailureVerdict(NamedTuple):
    """The outcome of a failure and the rule behind it."""

    outcome: FailureOutcome
    rule: str = ""
    """Name of the matching rule; empty for a default."""


class JudgedFailure(NamedTuple):
    """A failure with its verdict."""

    failure: PodFailure
    verdict: FailureVerdict


def judge_failure(
    failure: PodFailure, rules: Sequence[FailureRule] = (), *, has_begun: bool = False
) -> FailureVerdict:
    """The verdict on the failure of a pod.

    Args:
        failure: of the pod.
        rules: of the run; the first that matches decides.
        has_begun: the run's controller has reported before, so its store was reachable once.
    """
    for rule in rules:
        if _matches(rule, failure):
            return FailureVerdict(_OUTCOMES[rule.action], rule.name)
    return FailureVerdict(_default_outcome(failure, has_begun=has_begun))


def judge_stall(rules: Sequence[FailureRule]) -> FailureVerdict:
    """The verdict on a run that makes no progress."""
    for rule in rules:
        if rule.cause is Cause.STALLED:
            return FailureVerdict(_OUTCOMES[rule.action], rule.name)
    return FailureVerdict(FailureOutcome.RESTART_ROLE)


def gravest_failure(
    failures: Iterable[PodFailure], rules: Sequence[FailureRule], *, has_begun: bool = False
) -> JudgedFailure | None:
    """The failure with the gravest outcome; None if all are ignored."""
    judged = [
        JudgedFailure(each, judge_failure(each, rules, has_begun=has_begun)) for each in failures
    ]
    worst = max(judged, key=lambda each: each.verdict.outcome, default=None)
    return None if worst is None or worst.verdict.outcome is FailureOutcome.IGNORE else worst


def matched_conditions(rules: Iterable[FailureRule]) -> set[str]:
    """Pod condition types that rules match."""
    return {kind for rule in rules for kind in rule.pod_conditions or ()}


def _matches(rule: FailureRule, failure: PodFailure) -> bool:
    if rule.role is not None and rule.role != failure.role:
        return False
    if failure.exit_code is None:
        return failure.reason in (rule.pod_conditions or ())
    if rule.cause is not Cause.EXIT:
        return False
    codes = rule.exit_codes
    return codes is None or (failure.exit_code in codes.values) == (codes.op == "In")


def _default_outcome(failure: PodFailure, *, has_begun: bool) -> FailureOutcome:
    """The default outcome where no rule matches.

    The trainer is replaced immediately, as a new attempt with a new epoch. Engines and rewards hold
    no state that needs a new attempt: the kubelet restarts them, up to a limit. The kubelet also
    restarts a trainer whose store is down, without a limit: a new pod could not reach it either.
    Ray workers end with their head, and are restarted like it. In a run that never began, a wrong
    address of the store looks the same, and is a failure.
    """
    if failure.exit_code is None:
        return FailureOutcome.IGNORE
    if failure.exit_code in CONFIGURATION_EXITS:
        return FailureOutcome.FAIL
    ends = {failure.exit_code, failure.head_exit_code}
    if has_begun and failure.role == names.TRAINER and EXIT_TRY_AGAIN in ends:
        return FailureOutcome.IGNORE
    if failure.role == names.TRAINER or failure.restarts >= RESTARTS_IN_PLACE:
        return FailureOutcome.RESTART_ROLE
    return FailureOutcome.IGNORE


def failure_transition(
    run: RLRun, observed: ObservedRun, now: ClockReading
) -> RunTransition | None:
    """The transition for the gravest failure in the run's pods; None if none is needed."""
    attempts = transitions.attempts_of(run)
    rules = run.spec.failure_policy.listed
    awaited = matched_conditions(rules)
    failures = [
        failure
        for role in run_spec.pods_by_role(run)
        for failure in pod_failures.find_failures(
            role,
            pod_failures.pods_of_attempt(observed.pods.get(role, ()), attempts.get(role, 0)),
            awaited,
        )
    ]
    judged = gravest_failure(failures, rules, has_begun=run.status.step is not None)
    if judged is None:
        return None
    failure, verdict = judged
    failure_record = _failure_record(failure, now)
    if verdict == FailureVerdict(FailureOutcome.FAIL):
        message = f"{failure.pod} refused to start: {failure.message}"
        return RunTransition(
            transitions.new_intent(run, "Fail", Reason.INVALID_SPEC, message, now), failure_record
        )
    code = failure.exit_code
    what = f"ended with exit code {code}" if code is not None else f"has {failure.reason}"
    sentence = f"{failure.pod} {what}"
    return RunTransition(
        _intent_for(run, verdict, failure.role, Reason.ROLE_FAILED, sentence, now), failure_record
    )


def deadline_transition(
    run: RLRun, observed: ObservedRun, now: ClockReading
) -> RunTransition | None:
    """The failure of a run that crossed one of its deadlines; None before that."""
    if any(left <= 0 for left in limits.deadlines_left_s(run, observed, now)):
        given = run.spec.deadlines.model_dump(by_alias=True, exclude_none=True)
        words = ", ".join(f"{name} {value}" for name, value in given.items())
        message = f"the run has held pods for {limits.active_s(run, now.wall_s):.0f} s: {words}"
        return transitions.transition(run, "Fail", Reason.DEADLINE_EXCEEDED, message, now)
    return None


def stall_transition(run: RLRun, observed: ObservedRun, now: ClockReading) -> RunTransition | None:
    """The transition for a run that makes no progress; None while it does."""
    report = observed.report
    left = limits.progress_left_s(run, observed, now)
    if left is not None and left <= 0 and report.status is not None:
        message = f"nothing was finished for {limits.progress_limit_s(run, report.status):.0f} s"
        verdict = judge_stall(run.spec.failure_policy.listed)
        if verdict.outcome is not FailureOutcome.IGNORE:
            return RunTransition(
                _intent_for(run, verdict, names.TRAINER, Reason.NO_PROGRESS, message, now)
            )
    return None


def budget_transition(run: RLRun, now: ClockReading) -> RunTransition | None:
    """The suspension of a run whose budget is spent; None before that."""
    left_s = limits.budget_left_s(run, now)
    if left_s is None or left_s > 0:
        return None
    message = f"{limits.spent_limits(run, now)} is spent; raise it to go on"
    return transitions.transition(run, "Suspend", Reason.BUDGET_EXCEEDED, message, now)


def _intent_for(
    run: RLRun, verdict: FailureVerdict, role: str, reason: str, message: str, now: ClockReading
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
        case FailureOutcome.FAIL:
            return transitions.new_intent(run, "Fail", Reason.FAILURE_RULE, by_rule, now)
        case FailureOutcome.SUSPEND:
            return transitions.new_intent(run, "Suspend", Reason.FAILURE_RULE, by_rule, now)
        case FailureOutcome.RESTART_RUN:
            return transitions.restart_intent(run, "", reason, message, now)
        case FailureOutcome.RESTART_ROLE:
            return transitions.restart_intent(run, role, reason, message, now)
        case FailureOutcome.IGNORE:
            raise ValueError("FailureOutcome.IGNORE has no intent")


def _failure_record(failure: PodFailure, now: ClockReading) -> Failure:
    return Failure(
        time=rfc3339(now.wall_s),
        role=failure.role,
        pod=failure.pod,
        reason=failure.reason[:64],
        exit_code=failure.exit_code,
        message=failure.message[-1024:],
    )
