"""What the cluster refused, and whether that is news."""

import logging
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
    """The first refusal of each object's last pass, by its uid."""

    _known: dict[str, Refusal] = field(default_factory=dict)

    def fact(self, about: str) -> Fact | None:
        """What kept the last decision about an object from being carried out."""
        refusal = self._known.get(about)
        return None if refusal is None else refusal.fact

    def remember(self, manifest: Manifest, refusal: Refusal) -> bool:
        """Keep a refusal; True if it is news, which the next pass says in the status."""
        known = self._known.get(uid(manifest))
        if known is not None and known.is_like(refusal):
            return False
        self._known[uid(manifest)] = refusal
        log.warning("%s: %s", manifest["metadata"]["name"], refusal.error)
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
