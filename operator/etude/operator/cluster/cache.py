"""What this process knows of the cluster: every object it watches, never older than its writes."""

import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from etude.operator.cluster.api import Listener
from etude.operator.cluster.slim import unmanaged
from etude.operator.manifests import Manifest, Ref, controller_uid, ref, resource_version, uid

REMEMBERED_DELETIONS = 10_000
"""Late events of objects that are gone arrive within seconds; this many deletions take longer."""


@dataclass(slots=True)
class Cache:
    """Objects by name and by owner.

    Versions only grow: an event that is older than what is known, such as one that left before
    our own last write, is dropped. So is any event from before an object went.
    """

    slim: Callable[[Manifest], Manifest] = unmanaged
    """What of an object is kept."""
    _objects: defaultdict[str, dict[Ref, Manifest]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    """By kind: most readers want all objects of one, and pods are the many."""
    _names: dict[str, Ref] = field(default_factory=dict)
    """By uid."""
    _owned: defaultdict[str, set[Ref]] = field(default_factory=lambda: defaultdict(set))
    _gone: OrderedDict[str, float] = field(default_factory=OrderedDict)
    """The version at which an object went, by uid. One that only left what is watched, because
    somebody took a label off it, has a newer one when it comes back."""
    _lost: OrderedDict[Ref, None] = field(default_factory=OrderedDict)
    """What has gone and is not there again."""
    _listeners: list[Listener] = field(default_factory=list)

    def subscribe(self, listener: Listener) -> None:
        """Tell this listener of every change from now on."""
        self._listeners.append(listener)

    def get(self, key: Ref) -> Manifest | None:
        """One object."""
        return self._objects[key.kind].get(key)

    def known(self, uid: str) -> Manifest | None:
        """The object of this uid."""
        key = self._names.get(uid)
        return None if key is None else self.get(key)

    def every(self, kind: str) -> Sequence[Manifest]:
        """All objects of a kind."""
        return list(self._objects[kind].values())

    def owned(self, owner_uid: str) -> Sequence[Manifest]:
        """All objects that this one controls, by name."""
        return [self._objects[key.kind][key] for key in sorted(self._owned.get(owner_uid, ()))]

    def see(self, manifest: Manifest) -> bool:
        """Take over a version of an object; False when it is old news."""
        key = ref(manifest)
        known = self.get(key)
        if self.is_gone(uid(manifest), at=resource_version(manifest)):
            return False
        self._gone.pop(uid(manifest), None)
        if known is not None and resource_version(manifest) <= resource_version(known):
            return False
        if known is not None:
            self._unlink(key, known)
        manifest = self.slim(manifest)
        self._lost.pop(key, None)
        self._objects[key.kind][key] = manifest
        self._names[uid(manifest)] = key
        owner = controller_uid(manifest)
        if owner:
            self._owned[owner].add(key)
        self._tell(manifest)
        return True

    def amend(self, key: Ref, **metadata: object) -> None:
        """Remember what a write of ours did to an object's metadata, until the watch says so."""
        known = self.get(key)
        if known is not None:
            amended = {**known, "metadata": {**known["metadata"], **metadata}}
            self._objects[key.kind][key] = amended
            self._tell(amended)

    def lose(self, key: Ref, gone_uid: str, *, at: float = math.inf) -> None:
        """Forget an object; a newer one of the same name stays.

        Args:
            key: its name.
            gone_uid: which one of that name.
            at: the version as of which it is not there; for good if that is not known.
        """
        known = self.get(key)
        if known is not None and uid(known) == gone_uid and resource_version(known) > at:
            return
        self._gone[gone_uid] = at
        if len(self._gone) > REMEMBERED_DELETIONS:
            self._gone.popitem(last=False)
        if known is not None and uid(known) == gone_uid:
            self._unlink(key, known)
            del self._objects[key.kind][key]
            self._lost[key] = None
            if len(self._lost) > REMEMBERED_DELETIONS:
                self._lost.popitem(last=False)
            self._tell(known)

    def drop(self, kind: str) -> None:
        """Forget the objects of a kind that is not served; it may be served again, with them."""
        for key, known in list(self._objects[kind].items()):
            self._unlink(key, known)
            del self._objects[kind][key]
            self._tell(known)

    def is_gone(self, uid: str, *, at: int) -> bool:
        """Whether an object is known to have gone, as of a version of it."""
        return at <= self._gone.get(uid, -math.inf)

    def is_lost(self, key: Ref) -> bool:
        """Whether an object of this name was there lately and is not any more."""
        return key in self._lost

    def relist(
        self, kind: str, manifests: Iterable[Manifest], *, version: int, namespace: str = ""
    ) -> None:
        """Take over a complete list of a kind, in one namespace or all, made at a version."""
        listed = {ref(manifest): manifest for manifest in manifests}
        for manifest in listed.values():
            self.see(manifest)
        for known in self.every(kind):
            key = ref(known)
            is_listed_there = not namespace or key.namespace == namespace
            if is_listed_there and key not in listed and resource_version(known) <= version:
                self.lose(key, uid(known), at=version)

    def _unlink(self, key: Ref, known: Manifest) -> None:
        self._names.pop(uid(known), None)
        owner = controller_uid(known)
        if owner:
            self._owned[owner].discard(key)
            if not self._owned[owner]:
                del self._owned[owner]

    def _tell(self, manifest: Manifest) -> None:
        for listener in self._listeners:
            listener(manifest)
