"""Watches (informers) of the API server that keep the cache fresh."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from typing import NamedTuple

from etude.common.backoff import Backoff
from etude.operator import metrics, names
from etude.operator.kube.cache import WatchCache, without_managed_fields
from etude.operator.kube.discovery import Discovery
from etude.operator.kube.interface import ClusterError
from etude.operator.kube.rest import METADATA_ONLY, GoneError, RestClient, parse_read_reply, path_of
from etude.operator.manifests import (
    CLUSTER_SCOPED,
    OWN_KINDS,
    READ_ONLY,
    RESOURCES,
    Manifest,
    ref,
    resource_version,
    uid,
)

log = logging.getLogger(__name__)

CHILDREN = (
    *("StatefulSet", "Deployment", "Service", "ConfigMap", "PodDisruptionBudget"),
    *("NetworkPolicy", "Job", "Pod"),
)
"""Kinds watched here. kopf watches the operator's own kinds; this module lists those at the start
and checks them for gaps."""
SELECTOR = ("labelSelector", f"{names.MANAGED_BY}={names.MANAGER}")

FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 30.0
CHECK_EVERY_S = 300.0
"""Interval of the check for events that a watch has lost."""
CHECK_GRACE_S = 5.0
"""An event that a watch has not brought after this is lost."""
PAGE = 500
"""Objects per page of a list: all pods of a large cluster in one page would not fit in memory."""


class ListedVersions(NamedTuple):
    """Versions of all objects of a kind, as the API server listed them."""

    versions: Mapping[str, int]
    """By uid."""
    version: int
    """Resource version of the list."""


@dataclass(slots=True)
class Watches:
    """Lists and watches of the namespaces that the operator serves."""

    rest: RestClient
    cache: WatchCache
    namespaces: tuple[str, ...] = ()
    """All of them when empty."""
    children: tuple[str, ...] = CHILDREN
    discovery: Discovery = field(default_factory=Discovery)
    _extra: dict[str, list[asyncio.Task[None]]] = field(default_factory=dict)
    """Watch tasks of each served kind of other projects."""

    def apply_event(self, kind: str, manifest: Manifest) -> None:
        metrics.WATCH_LAST_EVENT.labels(manifest["kind"]).set_to_current_time()
        if kind == "DELETED":
            self.cache.remove(ref(manifest), uid(manifest), at=resource_version(manifest))
        else:
            self.cache.update(manifest)

    async def sync(self) -> None:
        """Fill the caches; afterwards keep_watching() keeps them filled.

        Children before their owners: a missing child was then not garbage-collected with an owner
        that was deleted between the lists.
        """
        for kind in (*self.children, *OWN_KINDS):
            for scope in self._scopes(kind):
                await self._retry(partial(self._list, kind, scope))
        await self._retry(self._discover)

    async def keep_watching(self) -> None:
        """Watch all children and check all watches for gaps, until cancelled."""
        async with asyncio.TaskGroup() as group:
            for kind in self.children:
                for scope in self._scopes(kind):
                    group.create_task(self._follow(kind, scope), name=f"watch-{kind}-{scope}")
            group.create_task(self._keep_checking(), name="watch-check")
            group.create_task(self._keep_discovering(group), name="discovery")

    async def _keep_discovering(self, group: asyncio.TaskGroup) -> None:
        """Watch kinds of other projects from their installation to their removal."""
        while True:
            try:
                usable = await self._discover()
            except ClusterError as error:
                log.warning("%s; retries when a kind is missed", error)
            else:
                self._follow_only(usable, group)
            await self.discovery.wait_until_due()

    def _follow_only(self, kinds: Set[str], group: asyncio.TaskGroup) -> None:
        for kind in kinds - self._extra.keys():
            self._extra[kind] = [
                group.create_task(self._follow(kind, scope), name=f"watch-{kind}-{scope}")
                for scope in self._scopes(kind)
            ]
        for kind in self._extra.keys() - kinds:
            for task in self._extra.pop(kind):
                task.cancel()
            self.cache.drop_kind(kind)

    async def _discover(self) -> set[str]:
        """Discover the usable kinds of other projects: served, with their objects in the cache."""
        served = await self.discovery.discover_kinds(self.rest)
        usable = {kind for kind in served if kind in self._extra or await self._can_list(kind)}
        self.discovery.set_usable_kinds(usable)
        return usable

    async def _can_list(self, kind: str) -> bool:
        try:
            for scope in self._scopes(kind):
                await self._list(kind, scope)
        except ClusterError as error:
            log.warning("%s is served but cannot be listed: %s", kind, error)
            return False
        return True

    async def _retry(self, ask: Callable[[], Awaitable[object]]) -> None:
        """Retry with backoff until there is an answer: the storage of a new CRD takes time."""
        backoff = Backoff(FIRST_DELAY_S, LONGEST_DELAY_S)
        while True:
            try:
                await ask()
            except ClusterError as error:
                log.warning("%s; retries in %.1f s", error, backoff.delay_s)
            else:
                return
            await asyncio.sleep(backoff.next_s())

    async def _follow(self, kind: str, namespace: str) -> None:
        backoff, version = Backoff(FIRST_DELAY_S, LONGEST_DELAY_S), ""
        while True:
            try:
                if not version:
                    version = await self._list(kind, namespace)
                async for reached in self._stream(kind, namespace, version):
                    version = reached
                    backoff.reset()
            except ClusterError as error:
                # Unless it is too old, the version is still valid and saves a list.
                version = "" if isinstance(error, GoneError) else version
                log.warning("watch of %s: %s; retries in %.1f s", kind, error, backoff.delay_s)
                await asyncio.sleep(backoff.next_s())

    async def _stream(self, kind: str, namespace: str, version: str) -> AsyncIterator[str]:
        """Apply the events of one watch; yields the versions to resume from."""
        query = [*_query(kind), ("resourceVersion", version), ("allowWatchBookmarks", "true")]
        async for event in self.rest.watch(path_of(kind, namespace), query):
            manifest = event["object"]
            if event["type"] != "BOOKMARK":
                self.apply_event(event["type"], {**_type_fields(kind), **manifest})
            yield manifest["metadata"]["resourceVersion"]

    async def _list(self, kind: str, namespace: str) -> str:
        listed, version = await self._list_pages(kind, namespace, self.cache.reduce_object)
        self.cache.relist(kind, listed, version=int(version), namespace=namespace)
        return version

    async def _list_pages(
        self,
        kind: str,
        namespace: str,
        kept: Callable[[Manifest], Manifest],
        headers: Mapping[str, str] | None = None,
    ) -> tuple[list[Manifest], str]:
        """List all objects of a kind, page by page; returns them and the version of the list.

        Raises:
            GoneError: the next page has expired; start again.
        """
        listed: list[Manifest] = []
        query = [*_query(kind), ("limit", str(PAGE))]
        path, token = path_of(kind, namespace), ""
        while True:
            page = [*query, ("continue", token)] if token else query
            reply = await self.rest.request("GET", path, query=page, headers=headers)
            if reply.status == HTTPStatus.GONE:
                raise GoneError(path)
            body = parse_read_reply(reply, f"list {kind}")
            listed += [kept({**_type_fields(kind), **item}) for item in body.get("items") or ()]
            token = body["metadata"].get("continue", "")
            if not token:
                return listed, body["metadata"]["resourceVersion"]

    async def _keep_checking(self) -> None:
        while True:
            await asyncio.sleep(CHECK_EVERY_S)
            await self._check()

    async def _check(self) -> None:
        """Compare versions with the API server's, and list kinds again whose watch has a gap.

        All versions are read before the pause, so that many namespaces take one pause.
        """
        found: dict[tuple[str, str], ListedVersions] = {}
        for kind in (*OWN_KINDS, *self.children, *self._extra):
            for scope in self._scopes(kind):
                try:
                    found[kind, scope] = await self._versions(kind, scope)
                except ClusterError as error:
                    log.warning("check of the watch of %s: %s", kind, error)
        await asyncio.sleep(CHECK_GRACE_S)
        for (kind, scope), listed in found.items():
            missed = sum(1 for _ in self._missed(kind, scope, listed))
            if missed:
                log.warning("the watch of %s missed %d changes", kind, missed)
                metrics.WATCH_GAPS.labels(kind).inc(missed)
                try:
                    await self._list(kind, scope)
                except ClusterError as error:
                    log.warning("%s; retries with the next check", error)

    async def _versions(self, kind: str, namespace: str) -> ListedVersions:
        accept = {"Accept": METADATA_ONLY}
        items, at = await self._list_pages(kind, namespace, without_managed_fields, accept)
        return ListedVersions({uid(item): resource_version(item) for item in items}, int(at))

    def _missed(self, kind: str, namespace: str, listed: ListedVersions) -> Iterator[str]:
        known = {
            uid(m): resource_version(m)
            for m in self.cache.list_objects(kind)
            if not namespace or ref(m).namespace == namespace
        }
        for item, item_version in listed.versions.items():
            if known.get(item, -1) < item_version and not self.cache.is_deleted(
                item, at=item_version
            ):
                yield item
        for item, known_version in known.items():
            if item not in listed.versions and known_version <= listed.version:
                yield item

    def _scopes(self, kind: str) -> tuple[str, ...]:
        return ("",) if kind in CLUSTER_SCOPED else self.namespaces or ("",)


def _query(kind: str) -> list[tuple[str, str]]:
    return [] if kind in {*OWN_KINDS, *READ_ONLY} else [SELECTOR]


def _type_fields(kind: str) -> Manifest:
    return {"apiVersion": RESOURCES[kind].api_version, "kind": kind}
