"""Verdicts on pod failures: the first matching rule of failurePolicy, else the defaults."""

from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import NamedTuple

from etude.common.api.run.lifecycle import Cause, FailureAction, FailureRule
from etude.common.process import EXIT_TRY_AGAIN
from etude.operator import names
from etude.operator.pod_failures import PodFailure

CONFIGURATION_EXITS = {64, 78}
"""EX_USAGE and EX_CONFIG of sysexits.h: a restart would only repeat them."""

RESTARTS_IN_PLACE = 5
"""The kubelet restarts engines and rewards in place this often before their pods are replaced."""


class Outcome(IntEnum):
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
    FailureAction.IGNORE: Outcome.IGNORE,
    FailureAction.RESTART_ROLE: Outcome.RESTART_ROLE,
    FailureAction.RESTART_RUN: Outcome.RESTART_RUN,
    FailureAction.CHECKPOINT_AND_SUSPEND: Outcome.SUSPEND,
    FailureAction.FAIL_RUN: Outcome.FAIL,
}


class Verdict(NamedTuple):
    """The outcome of a failure and the rule behind it."""

    outcome: Outcome
    rule: str = ""
    """Name of the matching rule; empty for a default."""


class Judged(NamedTuple):
    """A failure with its verdict."""

    failure: PodFailure
    verdict: Verdict


def verdict(
    failure: PodFailure, rules: Sequence[FailureRule] = (), *, has_begun: bool = False
) -> Verdict:
    """The verdict on the failure of a pod.

    Args:
        failure: of the pod.
        rules: of the run; the first that matches decides.
        has_begun: the run's controller has reported before, so its store was reachable once.
    """
    for rule in rules:
        if _matches(rule, failure):
            return Verdict(_OUTCOMES[rule.action], rule.name)
    return Verdict(_always(failure, has_begun=has_begun))


def stalled(rules: Sequence[FailureRule]) -> Verdict:
    """The verdict on a run that makes no progress."""
    for rule in rules:
        if rule.cause is Cause.STALLED:
            return Verdict(_OUTCOMES[rule.action], rule.name)
    return Verdict(Outcome.RESTART_ROLE)


def gravest(
    found: Iterable[PodFailure], rules: Sequence[FailureRule], *, has_begun: bool = False
) -> Judged | None:
    """The failure with the gravest outcome; None if all are ignored."""
    judged = [Judged(each, verdict(each, rules, has_begun=has_begun)) for each in found]
    worst = max(judged, key=lambda each: each.verdict.outcome, default=None)
    return None if worst is None or worst.verdict.outcome is Outcome.IGNORE else worst


def conditions(rules: Iterable[FailureRule]) -> set[str]:
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


def _always(failure: PodFailure, *, has_begun: bool) -> Outcome:
    """The default outcome where no rule matches.

    The trainer is replaced immediately, as a new attempt with a new epoch. Engines and rewards hold
    no state that needs a new attempt: the kubelet restarts them, up to a limit. The kubelet also
    restarts a trainer whose store is down, without a limit: a new pod could not reach it either. In
    a run that never began, a wrong address of the store looks the same, and is a failure.
    """
    if failure.exit_code is None:
        return Outcome.IGNORE
    if failure.exit_code in CONFIGURATION_EXITS:
        return Outcome.FAIL
    if has_begun and failure.role == names.TRAINER and failure.exit_code == EXIT_TRY_AGAIN:
        return Outcome.IGNORE
    if failure.role == names.TRAINER or failure.restarts >= RESTARTS_IN_PLACE:
        return Outcome.RESTART_ROLE
    return Outcome.IGNORE
