"""What the cluster refused, and whether that is news."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from etude.common.errors import EtudeError
from etude.operator.acceptance import ACCEPTED
from etude.operator.actions import Action, Apply, Delete
from etude.operator.conditions import Fact, no
from etude.operator.loop.outcomes import kept
from etude.operator.manifests import Manifest, Ref, ref, uid

PROBLEM_RETRY_S = 30.0
"""What was refused is tried again after this: what was in its way may be gone."""

log = logging.getLogger(__name__)


class Refusal(NamedTuple):
    """An action that the cluster does not take."""

    action: Action
    error: EtudeError

    @property
    def fact(self) -> Fact:
        """What the status says about it."""
        return no(ACCEPTED, self.error.reason, str(self.error))

    def is_like(self, other: "Refusal") -> bool:
        """Whether the same thing is refused for the same reason.

        The words may differ: those of a quota hold figures, and would be news for ever.
        """
        return (self.error.reason, aim(self.action)) == (other.error.reason, aim(other.action))


class _Try(NamedTuple):
    """A refusal, and what was there then."""

    refusal: Refusal
    live: str
    """Digest of the object that was to be written, empty where there was none."""
    at_s: float
    """On the monotonic clock."""


@dataclass(slots=True)
class Refusals:
    """What was refused of each object's last pass, by its uid; the first of it is told."""

    _known: dict[str, tuple[Refusal, ...]] = field(default_factory=dict)
    _tries: dict[str, list[_Try]] = field(default_factory=dict)
    """Those of the last while: passes come as often as anything happens."""

    def lately(
        self, about: str, action: Action, live: Manifest | None, now_s: float
    ) -> Refusal | None:
        """What this very action met with a moment ago, if what it would write is as it was then."""
        for tried in self._recent(about, now_s):
            if tried.refusal.action == action and tried.live == _digest(live):
                return tried.refusal
        return None

    def tried(self, about: str, refusal: Refusal, live: Manifest | None, now_s: float) -> None:
        """An action was refused just now, and this is the object that it would have written."""
        others = [
            each for each in self._recent(about, now_s) if each.refusal.action != refusal.action
        ]
        self._tries[about] = [*others, _Try(refusal, _digest(live), now_s)]

    def again_s(self, about: str, now_s: float) -> float:
        """Seconds until something that was refused may be tried again."""
        left = (each.at_s + PROBLEM_RETRY_S - now_s for each in self._recent(about, now_s))
        return min(left, default=PROBLEM_RETRY_S)

    def _recent(self, about: str, now_s: float) -> list[_Try]:
        return [each for each in self._tries.get(about, ()) if now_s - each.at_s < PROBLEM_RETRY_S]

    def fact(self, about: str) -> Fact | None:
        """What kept the last decision about an object from being carried out."""
        known = self._known.get(about)
        return None if known is None else known[0].fact

    def aims(self, about: str) -> frozenset[Ref]:
        """The objects that the cluster took no change of."""
        found = (aim(refusal.action) for refusal in self._known.get(about, ()))
        return frozenset(each for each in found if each is not None)

    def remember(self, manifest: Manifest, refused: Sequence[Refusal]) -> bool:
        """Keep what was refused; True if it is news, which the next pass takes into account."""
        known = self._known.get(uid(manifest), ())
        if len(known) == len(refused) and all(map(Refusal.is_like, known, refused)):
            return False
        self._known[uid(manifest)] = tuple(refused)
        log.warning("%s: %s", manifest["metadata"]["name"], refused[0].error)
        return True

    def end(self, about: str) -> bool:
        """Nothing is refused any more; whether something was."""
        return self._known.pop(about, None) is not None

    def forget(self, about: str) -> None:
        """The object is gone."""
        self._known.pop(about, None)
        self._tries.pop(about, None)


def _digest(live: Manifest | None) -> str:
    return "" if live is None else kept(live)


def aim(action: Action) -> Ref | None:
    """The object that is to be made or to go; None for the one that is looked at."""
    match action:
        case Apply():
            return ref(action.manifest)
        case Delete():
            return action.ref
        case _:
            return None
