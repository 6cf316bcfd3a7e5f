"""Watch cache: every watched object, never older than the writes of this process."""

import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from typing_extensions import override

from etude.operator.kube.interface import Cluster, Listener
from etude.operator.manifests import Manifest, Ref, controller_uid, ref, resource_version, uid

POD_SPEC = ("nodeName",)
"""Fields of a pod's spec that the operator reads, with a host name unlike the pod's name. The rest
is most of the memory of ten thousand pods."""


def without_managed_fields(manifest: Manifest) -> Manifest:
    """The object without managedFields, which every write lengthens."""
    if "managedFields" not in manifest["metadata"]:
        return manifest
    metadata = {k: v for k, v in manifest["metadata"].items() if k != "managedFields"}
    return {**manifest, "metadata": metadata}


def reduce_object(manifest: Manifest) -> Manifest:
    """The object as the cache of a large cluster keeps it."""
    if manifest["kind"] == "Pod" and "spec" in manifest:
        spec = {key: manifest["spec"][key] for key in POD_SPEC if key in manifest["spec"]}
        host = manifest["spec"].get("hostname")
        if host not in {None, manifest["metadata"]["name"]}:
            spec["hostname"] = host
        manifest = {**manifest, "spec": spec}
    return without_managed_fields(manifest)


REMEMBERED_DELETIONS = 10_000
"""Late events of deleted objects arrive within seconds; this many deletions take longer."""


@dataclass(slots=True)
class WatchCache:
    """Objects by name and by owner.

    Versions only grow: an event older than the cached object, such as one sent before this
    process's last write, is dropped. So is any event from before a deletion.
    """

    reduce_object: Callable[[Manifest], Manifest] = without_managed_fields
    """Reduces an object to the cached part."""
    _objects: defaultdict[str, dict[Ref, Manifest]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    """By kind, since most readers want all objects of one kind."""
    _names: dict[str, Ref] = field(default_factory=dict)
    """By uid."""
    _owned: defaultdict[str, set[Ref]] = field(default_factory=lambda: defaultdict(set))
    _deleted_uids: OrderedDict[str, float] = field(default_factory=OrderedDict)
    """Version at which an object was deleted, by uid. An object that only left the watch, because
    a label was removed, has a newer version when it returns."""
    _deleted_refs: OrderedDict[Ref, None] = field(default_factory=OrderedDict)
    """Names of deleted objects that were not created again."""
    _listeners: list[Listener] = field(default_factory=list)

    def subscribe(self, listener: Listener) -> None:
        self._listeners.append(listener)

    def get(self, key: Ref) -> Manifest | None:
        return self._objects[key.kind].get(key)

    def get_by_uid(self, uid: str) -> Manifest | None:
        key = self._names.get(uid)
        return None if key is None else self.get(key)

    def list_objects(self, kind: str) -> Sequence[Manifest]:
        return list(self._objects[kind].values())

    def list_owned(self, owner_uid: str) -> Sequence[Manifest]:
        """All objects that this one controls, by name."""
        return [self._objects[key.kind][key] for key in sorted(self._owned.get(owner_uid, ()))]

    def update(self, manifest: Manifest) -> bool:
        """Store a version of an object; returns False if it is not newer than the cached one."""
        key = ref(manifest)
        known = self.get(key)
        if self.is_deleted(uid(manifest), at=resource_version(manifest)):
            return False
        self._deleted_uids.pop(uid(manifest), None)
        if known is not None and resource_version(manifest) <= resource_version(known):
            return False
        if known is not None:
            self._unlink(key, known)
        manifest = self.reduce_object(manifest)
        self._deleted_refs.pop(key, None)
        self._objects[key.kind][key] = manifest
        self._names[uid(manifest)] = key
        owner = controller_uid(manifest)
        if owner:
            self._owned[owner].add(key)
        self._notify(manifest)
        return True

    def amend(self, key: Ref, **metadata: object) -> None:
        """Apply the effect of a write to cached metadata, until the watch brings it."""
        known = self.get(key)
        if known is not None:
            amended = {**known, "metadata": {**known["metadata"], **metadata}}
            self._objects[key.kind][key] = amended
            self._notify(amended)

    def remove(self, key: Ref, gone_uid: str, *, at: float = math.inf) -> None:
        """Remove a deleted object; a newer one of the same name stays.

        Args:
            key: its name.
            gone_uid: its uid.
            at: the version at which it was deleted; final if that is not known.
        """
        known = self.get(key)
        if known is not None and uid(known) == gone_uid and resource_version(known) > at:
            return
        self._deleted_uids[gone_uid] = at
        if len(self._deleted_uids) > REMEMBERED_DELETIONS:
            self._deleted_uids.popitem(last=False)
        if known is not None and uid(known) == gone_uid:
            self._unlink(key, known)
            del self._objects[key.kind][key]
            self._deleted_refs[key] = None
            if len(self._deleted_refs) > REMEMBERED_DELETIONS:
                self._deleted_refs.popitem(last=False)
            self._notify(known)

    def drop_kind(self, kind: str) -> None:
        """Remove the objects of a kind that is no longer served; they may return with it."""
        for key, known in list(self._objects[kind].items()):
            self._unlink(key, known)
            del self._objects[kind][key]
            self._notify(known)

    def is_deleted(self, uid: str, *, at: int) -> bool:
        return at <= self._deleted_uids.get(uid, -math.inf)

    def was_deleted(self, key: Ref) -> bool:
        return key in self._deleted_refs

    def relist(
        self, kind: str, manifests: Iterable[Manifest], *, version: int, namespace: str = ""
    ) -> None:
        """Replace the objects of a kind, in one namespace or all, by a list made at a version."""
        listed = {ref(manifest): manifest for manifest in manifests}
        for manifest in listed.values():
            self.update(manifest)
        for known in self.list_objects(kind):
            key = ref(known)
            is_listed_there = not namespace or key.namespace == namespace
            if is_listed_there and key not in listed and resource_version(known) <= version:
                self.remove(key, uid(known), at=version)

    def _unlink(self, key: Ref, known: Manifest) -> None:
        self._names.pop(uid(known), None)
        owner = controller_uid(known)
        if owner:
            self._owned[owner].discard(key)
            if not self._owned[owner]:
                del self._owned[owner]

    def _notify(self, manifest: Manifest) -> None:
        for listener in self._listeners:
            listener(manifest)


class CachedCluster(Cluster):
    """Reads of a cluster from its watch cache."""

    __slots__ = ()

    cache: WatchCache

    @override
    def get(self, ref: Ref) -> Manifest | None:
        return self.cache.get(ref)

    @override
    def get_by_uid(self, uid: str) -> Manifest | None:
        return self.cache.get_by_uid(uid)

    @override
    def list_objects(self, kind: str) -> Sequence[Manifest]:
        return self.cache.list_objects(kind)

    @override
    def list_owned(self, uid: str) -> Sequence[Manifest]:
        return self.cache.list_owned(uid)

    @override
    def subscribe(self, listener: Listener) -> None:
        self.cache.subscribe(listener)
