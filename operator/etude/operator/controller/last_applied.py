"""Last-applied cache: the object that the API server made of each manifest."""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

from etude.operator.manifests import Manifest, Ref, digest, is_applied, ref


class _LastApplied(NamedTuple):
    manifest: str
    """Digest of the manifest that was applied."""
    result: str
    """Digest of the object afterwards."""


@dataclass(slots=True)
class LastAppliedCache:
    """Results of the last apply of objects that differ from their manifests.

    API servers normalise some values (`cpu: 2` becomes "2", a false flag is dropped), and webhooks
    replace others, such as an image by the platform's mirror. Without this cache each pass would
    apply the same manifest again, without effect.
    """

    _known: defaultdict[str, dict[Ref, _LastApplied]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    """By the uid of the owner."""

    def remember(self, owner_uid: str, manifest: Manifest, made: Manifest) -> None:
        """Record the object that an apply of this manifest has just returned."""
        if is_applied(made, manifest):
            self._known[owner_uid].pop(ref(manifest), None)
        else:
            self._known[owner_uid][ref(manifest)] = _LastApplied(
                digest(manifest), stable_digest(made)
            )

    def is_current(self, owner_uid: str, manifest: Manifest, live: Manifest) -> bool:
        """Return true if the live object still is the result of applying this manifest."""
        known = self._known.get(owner_uid, {}).get(ref(manifest))
        return known is not None and known == _LastApplied(digest(manifest), stable_digest(live))

    def forget(self, owner_uid: str) -> None:
        self._known.pop(owner_uid, None)


def stable_digest(manifest: Manifest) -> str:
    """Digest of an object without status and fields that change with every write."""
    passing = {"resourceVersion", "managedFields"}
    metadata = {k: v for k, v in manifest["metadata"].items() if k not in passing}
    return digest({**{k: v for k, v in manifest.items() if k != "status"}, "metadata": metadata})
