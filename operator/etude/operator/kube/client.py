"""Client of an API server: reads from the watch cache, writes only while leading."""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from typing_extensions import override

from etude.common.tls import targets
from etude.operator.clock import rfc3339
from etude.operator.kube.cache import CachedCluster, WatchCache
from etude.operator.kube.discovery import Discovery
from etude.operator.kube.interface import (
    ClusterError,
    ConflictError,
    NameTakenError,
)
from etude.operator.kube.rest import (
    APPLY,
    JSON,
    MERGE,
    METADATA_ONLY,
    ApiReply,
    Query,
    RestClient,
    object_path,
    parse_read_reply,
    parse_write_reply,
    path_of,
)
from etude.operator.manifests import (
    CREATE_ONLY,
    CREATED_BY_POST,
    IMMUTABLE,
    Manifest,
    Ref,
    controller,
    controller_uid,
    is_deleting,
    merge_patch,
    ref,
    uid,
)


def take_over_fields(managed: Sequence[Manifest], manager: str) -> list[Manifest] | None:
    """The entries with the fields of a manager's create moved to its apply.

    A create is a separate owner: later applies could not remove its fields. None if the manager
    has no create entry.

    Source: https://pkg.go.dev/k8s.io/client-go/util/csaupgrade, which does it for kubectl.
    """
    created = [entry for entry in managed if _is_by(entry, manager, "Update")]
    if not created:
        return None
    applied = [entry for entry in managed if _is_by(entry, manager, "Apply")]
    fields: Manifest = {}
    for entry in (*applied, *created):
        fields = _union(fields, entry.get("fieldsV1") or {})
    ours = {**(*applied, *created)[0], "operation": "Apply", "fieldsV1": fields}
    others = [entry for entry in managed if entry not in created and entry not in applied]
    return [*others, ours]


def _is_by(entry: Mapping[str, Any], manager: str, operation: str) -> bool:
    who = (entry.get("manager"), entry.get("operation"), entry.get("subresource", ""))
    return who == (manager, operation, "")


def _union(one: Mapping[str, Any], other: Mapping[str, Any]) -> Manifest:
    """The fields of both sets; a set is a tree of names, a leaf an empty one."""
    shared = {key: _union(one[key], other[key]) for key in one.keys() & other.keys()}
    return {**one, **other, **shared}


log = logging.getLogger(__name__)

POD_OWNERS = (*CREATE_ONLY, "StatefulSet", "Deployment")

FORBIDDEN_RETRY_S = 2.0
"""Delay before a forbidden write is repeated: an API server that starts forbids everything."""


class GateClosedError(ClusterError):
    """This replica no longer leads and must not write."""


@dataclass(slots=True)
class KubernetesCluster(CachedCluster):
    """One API server, read through a cache that `Watches` keeps fresh."""

    rest: RestClient
    cache: WatchCache
    may_write: Callable[[], bool] = lambda: True
    discovery: Discovery = field(default_factory=Discovery)

    @override
    async def apply(self, manifest: Manifest, *, manager: str) -> Manifest:
        key = ref(manifest)
        live = self.cache.get(key)
        if live is None and key.kind not in CREATED_BY_POST:
            live = await self._read(key)
        if live is None and self.cache.was_deleted(key):
            await self._check_owner(key, manifest)
        if live is None and key.kind in CREATED_BY_POST:
            made = await self._create(key, manifest, manager)
            if made is not None:
                self.cache.update(made)
                return made
            live = await self._read(key)
        if live is not None and controller_uid(live) != controller_uid(manifest):
            raise NameTakenError(key)
        if live is None or key.kind not in IMMUTABLE:
            live = await self._change(key, manifest, live, manager)
        self.cache.update(live)
        return live

    @override
    async def delete(self, ref: Ref, *, uid: str, grace_s: int | None = None) -> None:
        # Owners of pods stay until their pods are deleted, so that these stay known.
        body: Manifest = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "propagationPolicy": "Foreground" if ref.kind in POD_OWNERS else "Background",
            "preconditions": {"uid": uid},
        }
        if grace_s is not None:
            body["gracePeriodSeconds"] = grace_s
        reply = await self._send("DELETE", object_path(ref), body)
        if reply.status == 404 or (reply.status == 409 and await self._is_replaced(ref, uid)):
            self.cache.remove(ref, uid)
            return
        parse_write_reply(reply, f"delete {ref.kind} {ref.name}")
        self.cache.amend(ref, deletionTimestamp=rfc3339(time.time()))

    @override
    async def replace_status(self, seen: Manifest, status: Manifest) -> Manifest:
        body = {
            "metadata": {"resourceVersion": seen["metadata"]["resourceVersion"]},
            "status": merge_patch(seen.get("status", {}), status),
        }
        reply = await self._write(ref(seen), body, subresource="status", content=MERGE)
        self.cache.update(reply)
        return reply

    @override
    async def set_finalizers(self, seen: Manifest, finalizers: Sequence[str]) -> None:
        version = seen["metadata"]["resourceVersion"]
        body = {"metadata": {"resourceVersion": version, "finalizers": list(finalizers) or None}}
        reply = await self._write(ref(seen), body, content=MERGE)
        if is_deleting(seen) and not finalizers:
            self.cache.amend(ref(seen), finalizers=[])
        else:
            self.cache.update(reply)

    @override
    async def adopt(self, seen: Manifest, metadata: Manifest) -> None:
        version = seen["metadata"]["resourceVersion"]
        body = {"metadata": {"resourceVersion": version, **metadata}}
        self.cache.update(await self._write(ref(seen), body, content=MERGE))

    @override
    async def record_event(self, event: Manifest) -> None:
        path = path_of("Event", event["metadata"]["namespace"])
        try:
            reply = await self._send_if_leading("POST", path, event)
        except GateClosedError:
            raise
        except ClusterError as error:
            log.warning("an Event was lost: %s", error)  # the status has the same content
            return
        if reply.status >= 300 and reply.status != 409:
            log.warning("an Event was rejected: %s", reply.body.get("message", reply.status))

    @override
    def address(self, namespace: str, target: str) -> str:
        """The pod's IP if it is known, since a DNS name lags behind a new pod.

        With its Service's name, which the certificate must have.
        """
        host, _, port = target.rpartition(":")
        pod = self._pod(namespace, host.partition(".")[0])
        address = (pod or {}).get("status", {}).get("podIP")
        if not address:
            return f"{host}.{namespace}.svc:{port}"
        return targets.named_target(
            f"{host.partition('.')[2]}.{namespace}.svc", f"{address}:{port}"
        )

    @override
    def usable_kinds(self, kinds: Collection[str]) -> frozenset[str]:
        return self.discovery.usable_kinds(kinds)

    def _pod(self, namespace: str, host: str) -> Manifest | None:
        """The pod of this host name, which differs from the pod's name only for Jobs."""
        named = self.cache.get(Ref("Pod", namespace, host))
        if named is not None:
            return named
        found = (
            pod
            for pod in self.cache.list_objects("Pod")
            if pod["spec"].get("hostname") == host and ref(pod).namespace == namespace
        )
        return next((pod for pod in found if not is_deleting(pod)), None)

    async def _is_replaced(self, key: Ref, known: str) -> bool:
        """Return true if the object of this uid no longer exists under its name.

        A conflict alone does not prove it: the server may have lost a race for an object that
        stays, and no event would trigger its deletion again. The request is a list, because the
        operator may not get every watched kind by name.
        """
        reply = await self.rest.request(
            "GET",
            path_of(key.kind, key.namespace),
            query=[("fieldSelector", f"metadata.name={key.name}")],
            headers={"Accept": METADATA_ONLY},
        )
        items = parse_read_reply(reply, f"look for {key.kind} {key.name}").get("items") or ()
        return all(uid(item) != known for item in items)

    async def _check_owner(self, key: Ref, manifest: Manifest) -> None:
        """Check that the owner of a deleted child still exists before the child is created again.

        Garbage collection deletes the children of a deleted owner, and their watch may report that
        before the owner's watch does.

        Raises:
            ConflictError: the owner is deleted.
        """
        owner = controller(manifest)
        if not owner:
            return
        at = Ref(owner["kind"], key.namespace, owner["name"])
        if await self._is_replaced(at, owner["uid"]):
            self.cache.remove(at, owner["uid"])
            raise ConflictError(
                f"{key.kind} {key.name} was garbage-collected with its owner, {at.kind} {at.name}"
            )

    async def _create(self, key: Ref, manifest: Manifest, manager: str) -> Manifest | None:
        """Create an object; returns None if its name is taken.

        For an API server a create is half the work of an apply, and needs no read before it.
        """
        query = [("fieldManager", manager), ("fieldValidation", "Strict")]
        path = path_of(key.kind, key.namespace)
        reply = await self._send("POST", path, manifest, query=query)
        if reply.status == 409 and reply.body.get("reason") == "AlreadyExists":
            return None
        return parse_write_reply(reply, f"{key.kind} {key.namespace}/{key.name}")

    async def _change(
        self, key: Ref, manifest: Manifest, live: Manifest | None, manager: str
    ) -> Manifest:
        """Apply a manifest, after taking over the fields that the creation wrote."""
        if live is not None and key.kind in CREATED_BY_POST:
            await self._take_over_fields(key, live, manager)
        if live is not None:
            # With a uid, server-side apply does not recreate an object deleted in between.
            manifest = {**manifest, "metadata": {**manifest["metadata"], "uid": uid(live)}}
        return await self._write(
            key, manifest, query=[("fieldManager", manager), ("force", "true")]
        )

    async def _take_over_fields(self, key: Ref, known: Manifest, manager: str) -> None:
        """Take over field ownership from the create, so that an apply can remove fields.

        Raises:
            ConflictError: the object has changed or was replaced.
        """
        live: Manifest | None = known
        if "managedFields" not in known["metadata"]:  # a cache does not keep them
            live = await self._read(key)
        if live is None or uid(live) != uid(known):
            raise ConflictError(
                f"{key.kind} {key.namespace}/{key.name} was deleted or replaced (uid changed)"
            )
        owners = take_over_fields(live["metadata"].get("managedFields") or (), manager)
        if owners is not None:
            at = live["metadata"]["resourceVersion"]
            body = {"metadata": {"resourceVersion": at, "managedFields": owners}}
            await self._write(key, body, content=MERGE)

    async def _read(self, key: Ref) -> Manifest | None:
        reply = await self.rest.request("GET", object_path(key))
        return None if reply.status == 404 else parse_read_reply(reply, f"read {key.name}")

    async def _write(
        self,
        key: Ref,
        body: Mapping[str, Any],
        *,
        query: Query = (),
        subresource: str = "",
        content: str = APPLY,
    ) -> Manifest:
        path = object_path(key, subresource)
        reply = await self._send("PATCH", path, body, query=query, content=content)
        if reply.status == 404 and content == MERGE:
            raise ConflictError(f"{key.kind} {key.namespace}/{key.name} was deleted")
        return parse_write_reply(reply, f"{key.kind} {key.namespace}/{key.name}")

    async def _send(
        self,
        verb: str,
        path: str,
        body: Mapping[str, Any],
        *,
        query: Query = (),
        content: str = JSON,
    ) -> ApiReply:
        """Send a write, and repeat it once if an authorizer refused it."""
        reply = await self._send_if_leading(verb, path, body, query=query, content=content)
        if not _is_unauthorized(reply):
            return reply
        await asyncio.sleep(FORBIDDEN_RETRY_S)
        return await self._send_if_leading(verb, path, body, query=query, content=content)

    async def _send_if_leading(
        self,
        verb: str,
        path: str,
        body: Mapping[str, Any],
        *,
        query: Query = (),
        content: str = JSON,
    ) -> ApiReply:
        """Send a write, if this replica leads after the wait for the rate limit.

        Raises:
            GateClosedError: this replica no longer leads.
        """
        await self.rest.budget.take()
        if not self.may_write():
            raise GateClosedError("this replica no longer leads; another may")
        headers = {"Content-Type": content}
        return await self.rest.request(
            verb, path, query=query, body=body, headers=headers, is_urgent=True
        )


def _is_unauthorized(reply: ApiReply) -> bool:
    """Return true if an authorizer refused, not a quota or a policy, which judge the object."""
    return reply.status == 403 and "is forbidden: User" in str(reply.body.get("message"))
