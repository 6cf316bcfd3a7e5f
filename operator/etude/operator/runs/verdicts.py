"""What follows from a failure: the first rule that matches, or else what always holds."""

from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import NamedTuple

from etude.common.api.lifecycle import Cause, FailureAction, FailureRule
from etude.common.ending import EXIT_TRY_AGAIN
from etude.operator import names
from etude.operator.failures import PodFailure

CONFIGURATION_EXITS = {64, 78}
"""EX_USAGE and EX_CONFIG of sysexits.h: a restart would only repeat them."""

RESTARTS_IN_PLACE = 5
"""The kubelet restarts engines and rewards in place this often before their pods are replaced."""


class Outcome(IntEnum):
    """What a failure leads to; of several failures the one with the gravest outcome decides."""

    IGNORE = 0
    """The kubelet or the StatefulSet puts it right."""
    RESTART_ROLE = 1
    """The role starts anew as the next attempt."""
    RESTART_RUN = 2
    """Every role does."""
    SUSPEND = 3
    """A checkpoint, then the pods go until somebody resumes the run."""
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
    """What follows, and by whose word."""

    outcome: Outcome
    rule: str = ""
    """The rule of the run that said so; empty for what always holds."""


class Judged(NamedTuple):
    """A failure with its verdict."""

    failure: PodFailure
    verdict: Verdict


def verdict(
    failure: PodFailure, rules: Sequence[FailureRule] = (), *, has_begun: bool = False
) -> Verdict:
    """What follows from the failure of a pod.

    Args:
        failure: it.
        rules: the run's, of which the first that matches decides.
        has_begun: whether the run's controller was heard before, so that its store once answered.
    """
    for rule in rules:
        if _matches(rule, failure):
            return Verdict(_OUTCOMES[rule.action], rule.name)
    return Verdict(_always(failure, has_begun=has_begun))


def stalled(rules: Sequence[FailureRule]) -> Verdict:
    """What follows when a run finishes nothing any more."""
    for rule in rules:
        if rule.cause is Cause.STALLED:
            return Verdict(_OUTCOMES[rule.action], rule.name)
    return Verdict(Outcome.RESTART_ROLE)


def gravest(
    found: Iterable[PodFailure], rules: Sequence[FailureRule], *, has_begun: bool = False
) -> Judged | None:
    """The failure that decides; None if nothing follows from any."""
    judged = [Judged(each, verdict(each, rules, has_begun=has_begun)) for each in found]
    worst = max(judged, key=lambda each: each.verdict.outcome, default=None)
    return None if worst is None or worst.verdict.outcome is Outcome.IGNORE else worst


def conditions(rules: Iterable[FailureRule]) -> set[str]:
    """The types of pod conditions that rules are about."""
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
    """What holds where no rule says otherwise.

    The trainer is replaced at once, as a new attempt with a new epoch. Engines and rewards hold
    nothing that is worth a new attempt: the kubelet restarts them, up to a limit. A trainer whose
    store is away is the kubelet's, too, for as long as that takes: another pod would fare no
    better. In a run that never began, a wrong address of the store looks just like that.
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
