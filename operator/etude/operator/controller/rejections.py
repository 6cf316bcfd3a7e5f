"""Rejections: actions that the API server refused, remembered per object and retried later."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from etude.common.errors import EtudeError
from etude.operator.actions import Action, Apply, Delete
from etude.operator.conditions import ACCEPTED, ConditionFact, false_condition
from etude.operator.controller.last_applied import stable_digest
from etude.operator.manifests import Manifest, Ref, ref, uid

PROBLEM_RETRY_S = 30.0
"""A rejected action is retried after this: its obstacle may be gone."""

log = logging.getLogger(__name__)


class Rejection(NamedTuple):
    """An action that the API server rejected, and its error."""

    action: Action
    error: EtudeError

    @property
    def condition(self) -> ConditionFact:
        """The condition that the status shows."""
        return false_condition(ACCEPTED, self.error.reason, str(self.error))

    def is_like(self, other: "Rejection") -> bool:
        """Return true if both reject a change of one object for one reason.

        Messages may differ: those of a quota contain changing numbers.
        """
        return (self.error.reason, target_of(self.action)) == (
            other.error.reason,
            target_of(other.action),
        )


class _Attempt(NamedTuple):
    """A rejection, and the live object at that time."""

    rejection: Rejection
    live: str
    """Digest of the object to be written; empty if it did not exist."""
    at_s: float
    """Monotonic time."""


@dataclass(slots=True)
class Rejections:
    """Rejected actions of each object's last pass, by the object's uid."""

    _known: dict[str, tuple[Rejection, ...]] = field(default_factory=dict)
    _tries: dict[str, list[_Attempt]] = field(default_factory=dict)
    """Rejections younger than the retry delay: passes come with every event."""

    def recent(
        self, about: str, action: Action, live: Manifest | None, now_s: float
    ) -> Rejection | None:
        """The recent rejection of this action, if the live object has not changed since."""
        for tried in self._recent(about, now_s):
            if tried.rejection.action == action and tried.live == _digest(live):
                return tried.rejection
        return None

    def record_attempt(
        self, about: str, rejection: Rejection, live: Manifest | None, now_s: float
    ) -> None:
        """Record a rejection and the live object that the action would have changed."""
        others = [
            each for each in self._recent(about, now_s) if each.rejection.action != rejection.action
        ]
        self._tries[about] = [*others, _Attempt(rejection, _digest(live), now_s)]

    def retry_after_s(self, about: str, now_s: float) -> float:
        """Seconds until the first rejected action may be retried."""
        left = (each.at_s + PROBLEM_RETRY_S - now_s for each in self._recent(about, now_s))
        return min(left, default=PROBLEM_RETRY_S)

    def _recent(self, about: str, now_s: float) -> list[_Attempt]:
        return [each for each in self._tries.get(about, ()) if now_s - each.at_s < PROBLEM_RETRY_S]

    def condition(self, about: str) -> ConditionFact | None:
        """The condition that shows why the last decision about an object was not carried out."""
        known = self._known.get(about)
        return None if known is None else known[0].condition

    def rejected_objects(self, about: str) -> frozenset[Ref]:
        found = (target_of(rejection.action) for rejection in self._known.get(about, ()))
        return frozenset(each for each in found if each is not None)

    def record(self, manifest: Manifest, rejections: Sequence[Rejection]) -> bool:
        """Record the rejections of a pass; returns true if they differ from those of the last."""
        known = self._known.get(uid(manifest), ())
        if len(known) == len(rejections) and all(map(Rejection.is_like, known, rejections)):
            return False
        self._known[uid(manifest)] = tuple(rejections)
        log.warning("%s: %s", manifest["metadata"]["name"], rejections[0].error)
        return True

    def clear(self, about: str) -> bool:
        """Record a pass without rejections; returns true if the last one had some."""
        return self._known.pop(about, None) is not None

    def forget(self, about: str) -> None:
        self._known.pop(about, None)
        self._tries.pop(about, None)


def _digest(live: Manifest | None) -> str:
    return "" if live is None else stable_digest(live)


def target_of(action: Action) -> Ref | None:
    """The object that an action applies or deletes; None for all other actions."""
    match action:
        case Apply():
            return ref(action.manifest)
        case Delete():
            return action.ref
        case _:
            return None
