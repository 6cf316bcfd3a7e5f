"""A cluster in memory, with the semantics of the API server that the operator relies on."""

import uuid
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from typing_extensions import override

from etude.operator.clock import Clock, ManualClock, rfc3339
from etude.operator.kube import workload_controllers as kubernetes_controllers
from etude.operator.kube.cache import CachedCluster, WatchCache
from etude.operator.kube.interface import ConflictError, NameTakenError
from etude.operator.manifests import (
    IMMUTABLE,
    Manifest,
    Ref,
    controller_uid,
    is_deleting,
    ref,
    resource_version,
    uid,
)


class Kubelet(Protocol):
    """Runs the pods of a MemoryCluster."""

    def start(self, cluster: "MemoryCluster", pod: Manifest) -> None: ...
    def stop(self, cluster: "MemoryCluster", pod: Manifest) -> None:
        """End the pod, then call `purge` of the cluster."""
        ...


@dataclass(slots=True)
class InstantKubelet(Kubelet):
    """Makes pods Ready when they are created and removes them when they are deleted, for tests."""

    @override
    def start(self, cluster: "MemoryCluster", pod: Manifest) -> None:
        cluster.set_status(ref(pod), kubernetes_controllers.ready_status(pod))

    @override
    def stop(self, cluster: "MemoryCluster", pod: Manifest) -> None:
        cluster.purge(ref(pod))


WriteHook = Callable[[str, Ref], None]
"""Receives verb and object of every write of the operator; may raise, to simulate a fault."""


def no_fault(verb: str, ref: Ref) -> None:
    """Let every write pass."""


@dataclass(slots=True)
class MemoryCluster(CachedCluster):
    """Objects, versions, owners, finalizers, workload controllers; no scheduler, no quota.

    Manifests are never changed in place, here or by the operator, and so they are shared.

    With is_lagging, the operator reads a cache that holds its own writes and the events that
    deliver_events() has delivered, as behind a slow watch.
    """

    clock: Clock = field(default_factory=ManualClock)
    kubelet: Kubelet = field(default_factory=InstantKubelet)
    is_lagging: bool = False
    after_write: WriteHook = no_fault
    events: list[Manifest] = field(default_factory=list)
    integrations: frozenset[str] = frozenset()
    """Served kinds of other projects."""
    _objects: dict[Ref, Manifest] = field(default_factory=dict)
    _applied: dict[tuple[Ref, str], Manifest] = field(default_factory=dict)
    cache: WatchCache = field(default_factory=WatchCache)
    _pending_events: deque[Callable[[], object]] = field(default_factory=deque)
    _unsettled: deque[Ref] = field(default_factory=deque)
    _is_settling: bool = False
    _version: int = 0

    @override
    async def apply(self, manifest: Manifest, *, manager: str) -> Manifest:
        key = ref(manifest)
        live = self._objects.get(key)
        if live is not None and controller_uid(live) != controller_uid(manifest):
            raise NameTakenError(key)
        if live is not None and key.kind in IMMUTABLE:
            return live
        before = self._applied.get((key, manager), {})
        self._applied[key, manager] = manifest
        stored = self._store(_merged(live or {}, before, manifest))
        self.cache.update(stored)
        self.after_write("apply", key)
        return self.cache.get(key) or stored

    @override
    async def delete(self, ref: Ref, *, uid: str, grace_s: int | None = None) -> None:
        live = self._objects.get(ref)
        if live is None or live["metadata"]["uid"] != uid:
            return
        self.cache.amend(ref, deletionTimestamp=self._timestamp())
        self.remove(ref, grace_s=grace_s)
        self.after_write("delete", ref)

    @override
    async def replace_status(self, seen: Manifest, status: Manifest) -> Manifest:
        key = self._current(seen)
        self.set_status(key, status)
        live = self._objects[key]
        self.cache.update(live)
        self.after_write("status", key)
        return live

    @override
    async def set_finalizers(self, seen: Manifest, finalizers: Sequence[str]) -> None:
        key = self._current(seen)
        live = self._objects[key]
        metadata = {**live["metadata"], "finalizers": list(finalizers)}
        if is_deleting(live) and not finalizers:
            self.cache.amend(key, finalizers=[])
            self.purge(key)
        else:
            self.cache.update(self._store({**live, "metadata": metadata}))
        self.after_write("finalizers", key)

    @override
    async def adopt(self, seen: Manifest, metadata: Manifest) -> None:
        key = self._current(seen)
        live = self._objects[key]
        before = live["metadata"]
        maps = {key: {**before.get(key, {}), **metadata.get(key, {})} for key in _MAPS}
        changed = {**before, **metadata, **maps}
        self.cache.update(self._store({**live, "metadata": changed}))
        self.after_write("adopt", key)

    @override
    async def record_event(self, event: Manifest) -> None:
        name = event["metadata"]["name"]
        if all(known["metadata"]["name"] != name for known in self.events):
            self.events.append(event)

    @override
    def address(self, namespace: str, target: str) -> str:
        return target

    @override
    def usable_kinds(self, kinds: Collection[str]) -> frozenset[str]:
        return self.integrations & frozenset(kinds)

    def upsert(self, manifest: Manifest) -> Manifest:
        """Create an object or replace its labels and spec, as a user does; its status stays."""
        live = self._objects.get(ref(manifest), {})
        metadata = {**live.get("metadata", {}), **manifest["metadata"]}
        status = live.get("status", manifest.get("status"))
        body = {**manifest, "metadata": metadata}
        return self._store(body if status is None else {**body, "status": status})

    def objects(self) -> dict[Ref, Manifest]:
        """All objects, including those that the operator's cache does not have yet."""
        return dict(self._objects)

    def set_status(self, ref: Ref, status: Manifest) -> None:
        """Write a status as the object's own controller does."""
        live = self._objects.get(ref)
        if live is not None:
            self._store({**live, "status": status})

    def remove(self, ref: Ref, *, grace_s: int | None = None) -> None:
        """Delete an object; pods and objects with finalizers get a deletion timestamp first."""
        live = self._objects.get(ref)
        if live is None or is_deleting(live):
            return
        if ref.kind == "Pod" or live["metadata"].get("finalizers"):
            metadata = {**live["metadata"], "deletionTimestamp": self._timestamp()}
            if grace_s is not None:
                metadata["deletionGracePeriodSeconds"] = grace_s
            self._store({**live, "metadata": metadata})
        else:
            self.purge(ref)

    def purge(self, ref: Ref) -> None:
        """Remove an object and everything that it owns."""
        live = self._objects.pop(ref, None)
        if live is None:
            return
        for key in [key for key in self._applied if key[0] == ref]:
            del self._applied[key]
        gone = uid(live)
        self._publish(lambda: self.cache.remove(ref, gone))
        for child in [key for key, m in self._objects.items() if controller_uid(m) == gone]:
            self.remove(child)
        self._unsettled.extend(self._owners(live))
        self._settle()

    def deliver_events(self, count: int | None = None) -> int:
        for _ in range(
            len(self._pending_events) if count is None else min(count, len(self._pending_events))
        ):
            self._pending_events.popleft()()
        return len(self._pending_events)

    def _current(self, seen: Manifest) -> Ref:
        key = ref(seen)
        live = self._objects.get(key)
        if live is None or resource_version(live) != resource_version(seen):
            raise ConflictError(f"{key.kind} {key.namespace}/{key.name} has changed")
        return key

    def _store(self, manifest: Manifest) -> Manifest:
        key = ref(manifest)
        live = self._objects.get(key)
        stored = self._versioned(manifest, live)
        if stored is live:
            return stored
        self._objects[key] = stored
        self._publish(lambda: self.cache.update(stored))
        self._unsettled.extend([key, *self._owners(stored)])
        self._settle()
        return self._objects.get(key, stored)

    def _versioned(self, manifest: Manifest, live: Manifest | None) -> Manifest:
        """The manifest with the API server's own fields; the live object if nothing differs."""
        metadata = dict(manifest["metadata"])
        if live is None:
            metadata.setdefault("namespace", "default")
            # A restored object keeps its identity.
            metadata["uid"] = metadata.get("uid") or str(uuid.uuid4())
            metadata["generation"] = metadata.get("generation") or 1
            metadata.setdefault("creationTimestamp", self._timestamp())
        else:
            for name in ("uid", "creationTimestamp", "resourceVersion", "generation"):
                metadata[name] = live["metadata"][name]
            if {**manifest, "metadata": metadata} == live:
                return live
            if manifest.get("spec") != live.get("spec"):
                metadata["generation"] += 1
        self._version += 1
        metadata["resourceVersion"] = str(self._version)
        return {**manifest, "metadata": metadata}

    def _publish(self, news: Callable[[], object]) -> None:
        if self.is_lagging:
            self._pending_events.append(news)
        else:
            news()

    def _owners(self, manifest: Manifest) -> list[Ref]:
        owner = controller_uid(manifest)
        return [key for key, m in self._objects.items() if owner and uid(m) == owner]

    def _settle(self) -> None:
        if self._is_settling:
            return
        self._is_settling = True
        try:
            while self._unsettled:
                live = self._objects.get(self._unsettled.popleft())
                if live is not None:
                    self._control(live)
        finally:
            self._is_settling = False

    def _control(self, live: Manifest) -> None:
        kind = live["kind"]
        if kind == "Pod" and is_deleting(live):
            self.kubelet.stop(self, live)
        elif kind == "Pod" and "status" not in live:
            self.kubelet.start(self, live)
        elif kind in {"StatefulSet", "Deployment"}:  # whose ReplicaSets are left out
            self._enact(kubernetes_controllers.stateful_set_changes(live, self._pods(live)))
        elif kind == "Job":
            self._control_job(live)

    def _control_job(self, job: Manifest) -> None:
        pods = self._pods(job)
        over = kubernetes_controllers.job_status(job, pods)
        if over is None:
            self._enact(kubernetes_controllers.job_changes(job, pods))
        elif "status" not in job:
            self.set_status(
                ref(job), kubernetes_controllers.finished_job(over, self.clock.wall_s())
            )

    def _enact(self, changes: kubernetes_controllers.PodChanges) -> None:
        for key in changes.deletes:
            self.remove(key)
        for pod in changes.creates:
            self._store(pod)

    def _pods(self, owner: Manifest) -> list[Manifest]:
        pods = [m for m in self._objects.values() if m["kind"] == "Pod"]
        return [pod for pod in pods if controller_uid(pod) == uid(owner)]

    def _timestamp(self) -> str:
        return rfc3339(self.clock.wall_s())


_MAPS = ("labels", "annotations")
"""Maps in metadata that a merge patch merges by key."""


def _merged(live: Manifest, before: Manifest, desired: Manifest) -> Manifest:
    """Server-side apply; lists are replaced whole."""
    kept = {key: value for key, value in live.items() if key in desired or key not in before}
    for key, value in desired.items():
        theirs, ours = kept.get(key), before.get(key)
        if isinstance(value, Mapping) and isinstance(theirs, Mapping):
            kept[key] = _merged(dict(theirs), dict(ours or {}), dict(value))
        else:
            kept[key] = value
    return kept
