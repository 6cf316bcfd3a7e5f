"""What the cluster refused, and whether that is news."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from etude.common.errors import EtudeError
from etude.operator.acceptance import ACCEPTED
from etude.operator.actions import Action, Apply, Delete
from etude.operator.conditions import Fact, no
from etude.operator.manifests import Manifest, Ref, ref, uid

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
        return (self.error.reason, _aim(self.action)) == (other.error.reason, _aim(other.action))


@dataclass(slots=True)
class Refusals:
    """What was refused of each object's last pass, by its uid; the first of it is told."""

    _known: dict[str, tuple[Refusal, ...]] = field(default_factory=dict)

    def fact(self, about: str) -> Fact | None:
        """What kept the last decision about an object from being carried out."""
        known = self._known.get(about)
        return None if known is None else known[0].fact

    def aims(self, about: str) -> frozenset[Ref]:
        """The objects that the cluster took no change of."""
        aims = (_aim(refusal.action) for refusal in self._known.get(about, ()))
        return frozenset(aim for aim in aims if aim is not None)

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


def _aim(action: Action) -> Ref | None:
    """The object that is to be made or to go; None for the one that is looked at."""
    match action:
        case Apply():
            return ref(action.manifest)
        case Delete():
            return action.ref
        case _:
            return None
