"""What came of what was applied: a cluster may write down another thing than it was given."""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

from etude.operator.manifests import Manifest, Ref, digest, is_applied, ref


class _Outcome(NamedTuple):
    wanted: str
    """Digest of what was applied."""
    made: str
    """Digest of what was there afterwards."""


@dataclass(slots=True)
class Outcomes:
    """Of the objects that do not say what they were made to say, what came of the last apply.

    API servers write some values their own way (`cpu: 2` as "2", a false flag not at all), and
    webhooks put others in their place, such as an image of the platform's mirror. To apply the
    same once more would change nothing, at each pass over a run that works.
    """

    _known: defaultdict[str, dict[Ref, _Outcome]] = field(default_factory=lambda: defaultdict(dict))
    """By the uid of the owner."""

    def remember(self, owner_uid: str, manifest: Manifest, made: Manifest) -> None:
        """This manifest was applied just now, and this is what the cluster made of it."""
        if is_applied(made, manifest):
            self._known[owner_uid].pop(ref(manifest), None)
        else:
            self._known[owner_uid][ref(manifest)] = _Outcome(digest(manifest), kept(made))

    def stands(self, owner_uid: str, manifest: Manifest, live: Manifest) -> bool:
        """Whether the live object still is what came of this very manifest."""
        known = self._known.get(owner_uid, {}).get(ref(manifest))
        return known is not None and known == _Outcome(digest(manifest), kept(live))

    def forget(self, owner_uid: str) -> None:
        """The owner is gone."""
        self._known.pop(owner_uid, None)


def kept(manifest: Manifest) -> str:
    """Digest of what stays of an object while nobody changes it."""
    passing = {"resourceVersion", "managedFields"}
    metadata = {k: v for k, v in manifest["metadata"].items() if k not in passing}
    return digest({**{k: v for k, v in manifest.items() if k != "status"}, "metadata": metadata})
