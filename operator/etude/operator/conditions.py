"""Status conditions: merged with their predecessors, filtered for Events and metrics."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from etude.common.api.meta import Condition
from etude.operator.reasons import Reason

MAX_MESSAGE = 2_048
ACCEPTED = "Accepted"
"""Condition of a spec without findings."""


class ConditionFact(NamedTuple):
    """The current state of a condition, without its times."""

    type: str
    holds: bool
    reason: str
    message: str = ""


def true_condition(kind: str, reason: str, message: str = "") -> ConditionFact:
    """A condition that is True."""
    return ConditionFact(kind, holds=True, reason=reason, message=message)


def false_condition(kind: str, reason: str, message: str = "") -> ConditionFact:
    """A condition that is False."""
    return ConditionFact(kind, holds=False, reason=reason, message=message)


def merge_conditions(
    facts: Iterable[ConditionFact], before: Sequence[Condition], *, generation: int, now: str
) -> tuple[Condition, ...]:
    """Conditions of these states; one with an unchanged status keeps its transition time."""
    known = {condition.type: condition for condition in before}
    return tuple(_condition(fact, known.get(fact.type), generation, now) for fact in facts)


def _condition(
    fact: ConditionFact, before: Condition | None, generation: int, now: str
) -> Condition:
    status = "True" if fact.holds else "False"
    unchanged = before is not None and before.status == status
    return Condition.model_construct(
        type=fact.type,
        status=status,
        reason=fact.reason,
        message=fact.message[:MAX_MESSAGE],
        observed_generation=generation,
        last_transition_time=before.last_transition_time if before and unchanged else now,
    )


def is_condition_true(status: Iterable[Condition], kind: str) -> bool:
    """Return true if this condition is True."""
    return any(c.type == kind and c.status == "True" for c in status)


def unhealthy_conditions(found: Iterable[Condition]) -> set[tuple[str, str]]:
    """Unhealthy conditions that may recover, with their reasons.

    Without final ones, and without those that need a change of the spec.
    """
    return {
        (each.type, each.reason)
        for each in found
        if (each.type in WARN_WHEN_TRUE - {"Failed"} and each.status == "True")
        or (each.type in WARN_WHEN_FALSE - {"Accepted"} and each.status == "False")
        or (each.type, each.reason) in BLOCKED_CANDIDATES
    }


class ConditionTransition(NamedTuple):
    """A changed condition that is recorded as an Event."""

    condition: Condition
    is_warning: bool


WARN_WHEN_TRUE = {"Failed", "Stalled", "Degraded", "HardCapped"}
WARN_WHEN_FALSE = {"Accepted", "CheckpointHealthy"}
BLOCKED_CANDIDATES = {
    ("CandidateProposed", Reason.EVALUATION_FAILED),
    ("CandidateProposed", Reason.NO_BASELINE),
}
"""A person should act: after a failed evaluation of the version in use, or without one, no later
checkpoint is proposed either."""
RECORD_WHEN_TRUE = {
    *("Accepted", "Ready", "Available", "Suspended", "Complete", "Verified"),
    "CandidateProposed",
}


def condition_transitions(
    before: Sequence[Condition], after: Sequence[Condition]
) -> list[ConditionTransition]:
    """Changed conditions that are recorded as Events."""
    known = {condition.type: condition.status for condition in before}
    found = []
    for condition in after:
        if known.get(condition.type) == condition.status:
            continue
        if condition.status == "True" and condition.type in WARN_WHEN_TRUE | RECORD_WHEN_TRUE:
            found.append(ConditionTransition(condition, condition.type in WARN_WHEN_TRUE))
        if condition.status == "False" and condition.type in WARN_WHEN_FALSE:
            found.append(ConditionTransition(condition, is_warning=True))
    return found
