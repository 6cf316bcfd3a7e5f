"""The real cluster: reads from watch caches, writes through a gate that only a leader opens."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from typing_extensions import override

from etude.operator import metrics, names
from etude.operator.clock import rfc3339
from etude.operator.cluster.api import (
    Cluster,
    ClusterError,
    ConflictError,
    Listener,
    NameTakenError,
)
from etude.operator.cluster.cache import Cache
from etude.operator.cluster.rest import (
    APPLY,
    MERGE,
    METADATA_ONLY,
    GoneError,
    Query,
    Rest,
    accepted,
    object_path,
    path_of,
)
from etude.operator.manifests import (
    RESOURCES,
    Manifest,
    Ref,
    controller_uid,
    is_deleting,
    merge_patch,
    ref,
    resource_version,
    uid,
)

log = logging.getLogger(__name__)

OURS = ("RLRun", "EnvPool", "Checkpoint")
"""Watched by kopf; listed here once at the start and in every check."""
CHILDREN = ("StatefulSet", "Service", "ConfigMap", "PodDisruptionBudget", "Job", "Pod")
SELECTOR = ("labelSelector", f"{names.MANAGED_BY}={names.OURS}")

FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 30.0
CHECK_EVERY_S = 300.0
"""A watch that silently lost something is found out after this."""
CHECK_GRACE_S = 5.0
"""What a watch has not brought by then, it has missed."""


class GateClosedError(ClusterError):
    """This replica does not lead any more: it must not write."""


@dataclass(slots=True)
class KubernetesCluster(Cluster):
    """One API server, seen through caches of the namespaces that are served."""

    rest: Rest
    namespaces: tuple[str, ...] = ()
    """All of them when empty."""
    may_write: Callable[[], bool] = lambda: True
    _cache: Cache = field(default_factory=Cache)

    @override
    async def apply(self, manifest: Manifest, *, manager: str) -> Manifest:
        key = ref(manifest)
        live = self._cache.get(key) or await self._read(key)
        if live is not None and controller_uid(live) != controller_uid(manifest):
            raise NameTakenError(key)
        if live is not None:
            # With a uid, server-side apply refuses to create what has gone in between.
            manifest = {**manifest, "metadata": {**manifest["metadata"], "uid": uid(live)}}
        reply = await self._write(
            "PATCH", key, manifest, query=[("fieldManager", manager), ("force", "true")]
        )
        self._cache.see(reply)
        return reply

    @override
    async def delete(self, ref: Ref, *, uid: str) -> None:
        body = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "propagationPolicy": "Background",
            "preconditions": {"uid": uid},
        }
        self._check_gate()
        reply = await self.rest.request("DELETE", object_path(ref), body=body)
        if reply.status not in {404, 409}:  # gone already, or another object of the same name
            accepted(reply, f"delete {ref.kind} {ref.name}")
            self._cache.amend(ref, deletionTimestamp=rfc3339(time.time()))

    @override
    async def replace_status(self, seen: Manifest, status: Manifest) -> Manifest:
        body = {
            "metadata": {"resourceVersion": seen["metadata"]["resourceVersion"]},
            "status": merge_patch(seen.get("status", {}), status),
        }
        reply = await self._write("PATCH", ref(seen), body, subresource="status", content=MERGE)
        self._cache.see(reply)
        return reply

    @override
    async def set_finalizers(self, seen: Manifest, finalizers: Sequence[str]) -> None:
        version = seen["metadata"]["resourceVersion"]
        body = {"metadata": {"resourceVersion": version, "finalizers": list(finalizers) or None}}
        reply = await self._write("PATCH", ref(seen), body, content=MERGE)
        if is_deleting(seen) and not finalizers:
            self._cache.amend(ref(seen), finalizers=[])
        else:
            self._cache.see(reply)

    @override
    async def record(self, event: Manifest) -> None:
        self._check_gate()
        namespace = event["metadata"]["namespace"]
        path = path_of("Event", namespace)
        try:
            reply = await self.rest.request("POST", path, body=event)
        except ClusterError as error:
            log.warning("an Event was lost: %s", error)  # it only tells what the status says too
            return
        if reply.status >= 300 and reply.status != 409:
            log.warning("an Event was refused: %s", reply.body.get("message", reply.status))

    @override
    def get(self, ref: Ref) -> Manifest | None:
        return self._cache.get(ref)

    @override
    def every(self, kind: str) -> Sequence[Manifest]:
        return self._cache.every(kind)

    @override
    def owned(self, uid: str) -> Sequence[Manifest]:
        return self._cache.owned(uid)

    @override
    def address(self, namespace: str, target: str) -> str:
        """By the pod's own address where it is known: a DNS name lags behind a new pod."""
        host, _, port = target.rpartition(":")
        pod = self._cache.get(Ref("Pod", namespace, host.partition(".")[0]))
        address = (pod or {}).get("status", {}).get("podIP")
        return f"{address}:{port}" if address else f"{host}.{namespace}.svc:{port}"

    @override
    def subscribe(self, listener: Listener) -> None:
        self._cache.subscribe(listener)

    def observe(self, kind: str, manifest: Manifest) -> None:
        """Take over one event of a watch."""
        metrics.WATCH_LAST_EVENT.labels(manifest["kind"]).set_to_current_time()
        if kind == "DELETED":
            self._cache.lose(ref(manifest), uid(manifest))
        else:
            self._cache.see(_slim(manifest))

    async def sync(self) -> None:
        """Fill the caches; afterwards keep_watching() keeps them filled."""
        for kind in (*OURS, *CHILDREN):
            for scope in self._scopes():
                await self._first_list(kind, scope)

    async def keep_watching(self) -> None:
        """Follow every child, and check everything now and then, until cancelled."""
        async with asyncio.TaskGroup() as group:
            for kind in CHILDREN:
                for scope in self._scopes():
                    group.create_task(self._follow(kind, scope), name=f"watch-{kind}-{scope}")
            group.create_task(self._keep_checking(), name="watch-check")

    async def _first_list(self, kind: str, namespace: str) -> None:
        """List with patience: the storage of a CRD that was just installed is not there yet."""
        delay_s = FIRST_DELAY_S
        while True:
            try:
                await self._list(kind, namespace)
            except ClusterError as error:
                log.warning("%s; again in %.1f s", error, delay_s)
            else:
                return
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, LONGEST_DELAY_S)

    async def _follow(self, kind: str, namespace: str) -> None:
        delay_s, version = FIRST_DELAY_S, ""
        while True:
            try:
                if not version:
                    version = await self._list(kind, namespace)
                version = await self._stream(kind, namespace, version)
                delay_s = FIRST_DELAY_S
            except GoneError:
                version = ""
            except ClusterError as error:
                log.warning("%s: %s; again in %.1f s", kind, error, delay_s)
                await asyncio.sleep(delay_s)
                delay_s = min(2 * delay_s, LONGEST_DELAY_S)

    async def _stream(self, kind: str, namespace: str, version: str) -> str:
        """Take over the events of one watch; returns the version to go on from.

        Raises:
            GoneError: it is too old; list again.
        """
        query = [*_query(kind), ("resourceVersion", version), ("allowWatchBookmarks", "true")]
        try:
            async for event in self.rest.watch(path_of(kind, namespace), query):
                manifest = event["object"]
                if event["type"] != "BOOKMARK":
                    self.observe(event["type"], {**_typed(kind), **manifest})
                version = manifest["metadata"]["resourceVersion"]
        except GoneError:
            raise
        except ClusterError as error:
            # The version is still good: go on from it instead of listing again.
            log.info("%s: %s", kind, error)
            await asyncio.sleep(FIRST_DELAY_S)
        return version

    async def _list(self, kind: str, namespace: str) -> str:
        reply = await self.rest.request("GET", path_of(kind, namespace), query=_query(kind))
        body = accepted(reply, f"list {kind}")
        version: str = body["metadata"]["resourceVersion"]
        listed = [_slim({**_typed(kind), **item}) for item in body.get("items") or ()]
        self._cache.relist(kind, listed, version=int(version), namespace=namespace)
        return version

    async def _keep_checking(self) -> None:
        while True:
            await asyncio.sleep(CHECK_EVERY_S)
            for kind in (*OURS, *CHILDREN):
                for scope in self._scopes():
                    try:
                        await self._check(kind, scope)
                    except ClusterError as error:
                        log.warning("check of %s: %s", kind, error)

    async def _check(self, kind: str, namespace: str) -> None:
        """Compare versions with the API server's, and list again where the watch missed one."""
        reply = await self.rest.request(
            "GET", path_of(kind, namespace), query=_query(kind), headers={"Accept": METADATA_ONLY}
        )
        body = accepted(reply, f"check {kind}")
        listed = {
            item["metadata"]["uid"]: int(item["metadata"]["resourceVersion"])
            for item in body.get("items") or ()
        }
        version = int(body["metadata"]["resourceVersion"])
        await asyncio.sleep(CHECK_GRACE_S)
        missed = sum(1 for _ in self._missed(kind, namespace, listed, version))
        if missed:
            log.warning("the watch of %s missed %d changes", kind, missed)
            metrics.WATCH_GAPS.labels(kind).inc(missed)
            await self._list(kind, namespace)

    def _missed(
        self, kind: str, namespace: str, listed: Mapping[str, int], version: int
    ) -> Iterator[str]:
        known = {
            uid(m): resource_version(m)
            for m in self._cache.every(kind)
            if not namespace or ref(m).namespace == namespace
        }
        for item, item_version in listed.items():
            if known.get(item, -1) < item_version and not self._cache.is_gone(item):
                yield item
        for item, known_version in known.items():
            if item not in listed and known_version <= version:
                yield item

    async def _read(self, key: Ref) -> Manifest | None:
        reply = await self.rest.request("GET", object_path(key))
        return None if reply.status == 404 else _slim(accepted(reply, f"read {key.name}"))

    async def _write(
        self,
        verb: str,
        key: Ref,
        body: Mapping[str, Any],
        *,
        query: Query = (),
        subresource: str = "",
        content: str = APPLY,
    ) -> Manifest:
        self._check_gate()
        reply = await self.rest.request(
            verb,
            object_path(key, subresource),
            query=query,
            body=body,
            headers={"Content-Type": content},
        )
        if reply.status == 404 and content == MERGE:
            raise ConflictError(f"{key.kind} {key.namespace}/{key.name} is gone")
        return _slim(accepted(reply, f"{key.kind} {key.namespace}/{key.name}"))

    def _check_gate(self) -> None:
        if not self.may_write():
            raise GateClosedError("another replica may lead by now")

    def _scopes(self) -> tuple[str, ...]:
        return self.namespaces or ("",)


def _query(kind: str) -> list[tuple[str, str]]:
    return [SELECTOR] if kind in CHILDREN else []


def _typed(kind: str) -> Manifest:
    """Items of a list do not say what they are."""
    return {"apiVersion": RESOURCES[kind].api_version, "kind": kind}


def _slim(manifest: Manifest) -> Manifest:
    """The object without what nobody here reads and every write lengthens."""
    metadata = {k: v for k, v in manifest["metadata"].items() if k != "managedFields"}
    return {**manifest, "metadata": metadata}
