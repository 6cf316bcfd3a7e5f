"""Conditions: dated facts, each with its reason."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from etude.common.api.meta import Condition

MAX_MESSAGE = 2_048


class Fact(NamedTuple):
    """What a condition says now."""

    type: str
    holds: bool
    reason: str
    message: str = ""


def yes(kind: str, reason: str, message: str = "") -> Fact:
    """A condition that is True."""
    return Fact(kind, holds=True, reason=reason, message=message)


def no(kind: str, reason: str, message: str = "") -> Fact:
    """A condition that is False."""
    return Fact(kind, holds=False, reason=reason, message=message)


def conditions(
    facts: Iterable[Fact], before: Sequence[Condition], *, generation: int, now: str
) -> tuple[Condition, ...]:
    """The facts as conditions; one that did not change keeps its time."""
    known = {condition.type: condition for condition in before}
    return tuple(_condition(fact, known.get(fact.type), generation, now) for fact in facts)


def _condition(fact: Fact, before: Condition | None, generation: int, now: str) -> Condition:
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


def holds(status: Iterable[Condition], kind: str) -> bool:
    """Whether this condition is True."""
    return any(c.type == kind and c.status == "True" for c in status)


def troubles(found: Iterable[Condition]) -> set[tuple[str, str]]:
    """What is wrong and may come right again: conditions with their reasons.

    Not what is over, and not what a user has to write differently.
    """
    return {
        (each.type, each.reason)
        for each in found
        if (each.type in WARN_WHEN_TRUE - {"Failed"} and each.status == "True")
        or (each.type in WARN_WHEN_FALSE - {"Accepted"} and each.status == "False")
    }


class Transition(NamedTuple):
    """A condition that is worth an Event."""

    condition: Condition
    is_warning: bool


WARN_WHEN_TRUE = {"Failed", "Stalled", "Degraded", "HardCapped"}
WARN_WHEN_FALSE = {"Accepted", "CheckpointHealthy"}
TELL_WHEN_TRUE = {"Accepted", "Ready", "Available", "Suspended", "Complete", "Verified"}


def transitions(before: Sequence[Condition], after: Sequence[Condition]) -> list[Transition]:
    """Conditions whose status changed in a way that somebody wants to hear of."""
    known = {condition.type: condition.status for condition in before}
    found = []
    for condition in after:
        if known.get(condition.type) == condition.status:
            continue
        if condition.status == "True" and condition.type in WARN_WHEN_TRUE | TELL_WHEN_TRUE:
            found.append(Transition(condition, condition.type in WARN_WHEN_TRUE))
        if condition.status == "False" and condition.type in WARN_WHEN_FALSE:
            found.append(Transition(condition, is_warning=True))
    return found
