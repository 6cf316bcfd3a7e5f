"""Everything that happens to the objects of a cluster, in the order in which it happened."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import aiohttp
from tests.support.kube.api_client import ApiClient

from etude.operator.kube.rest import path_of
from etude.operator.manifests import RESOURCES, Manifest, Ref, ref, resource_version

log = logging.getLogger(__name__)

KINDS = (
    *("RLRun", "EnvPool", "Checkpoint", "Pod", "Service", "ConfigMap", "StatefulSet", "Job"),
    *("PodDisruptionBudget", "NetworkPolicy"),
)
"""What an operator makes, and what it is told of."""
RETRY_S = 0.2


class Event(NamedTuple):
    """One version of one object."""

    version: int
    """Of the whole cluster: versions of all kinds are one sequence."""
    type: str
    ref: Ref
    manifest: Manifest


@dataclass(slots=True)
class Scenery:
    """One namespace: what is there, what was there, and who waits for news."""

    objects: dict[Ref, Manifest] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    listeners: list[Callable[[Event], None]] = field(default_factory=list)
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    def see(self, event: Event) -> None:
        """Take one event over."""
        self.events.append(event)
        if event.type == "DELETED":
            self.objects.pop(event.ref, None)
        else:
            self.objects[event.ref] = event.manifest
        for listener in list(self.listeners):
            listener(event)
        self._news.set()
        self._news = asyncio.Event()

    async def until(self, holds: Callable[[], object]) -> None:
        """Wait until the objects are as wanted."""
        while True:
            news = self._news
            if holds():
                return
            await news.wait()

    async def quiet(self, seconds: float) -> None:
        """Wait until nothing has changed for a while."""
        while True:
            try:
                async with asyncio.timeout(seconds):
                    await self._news.wait()
            except TimeoutError:
                return

    def ordered(self) -> list[Event]:
        """The history; the watches of several kinds are not in step."""
        return sorted(self.events, key=lambda event: event.version)

    def every(self, kind: str) -> list[Manifest]:
        return [m for key, m in sorted(self.objects.items()) if key.kind == kind]


@dataclass(slots=True)
class Observer:
    """Watches all kinds of all namespaces."""

    api: ApiClient
    scenes: defaultdict[str, Scenery] = field(default_factory=lambda: defaultdict(Scenery))
    _newest: dict[Ref, int] = field(default_factory=dict)

    async def run(self, started: asyncio.Event) -> None:
        """Watch until cancelled."""
        async with asyncio.TaskGroup() as group:
            firsts = [asyncio.Event() for _ in KINDS]
            for kind, first in zip(KINDS, firsts, strict=True):
                group.create_task(self._follow(kind, first), name=f"observe-{kind}")
            for first in firsts:
                await first.wait()
            started.set()

    async def _follow(self, kind: str, first: asyncio.Event) -> None:
        version = ""
        while True:
            try:
                version = version or await self._list(kind)
                first.set()
                async for event in self.api.watch(path_of(kind), resourceVersion=version):
                    if event["type"] == "ERROR":
                        version = ""
                        break
                    version = event["object"]["metadata"]["resourceVersion"]
                    self._take(kind, event["type"], event["object"])
            except (aiohttp.ClientError, OSError, TimeoutError, AssertionError, ValueError) as e:
                log.info("observing %s: %r", kind, e)  # the API server was killed
            await asyncio.sleep(RETRY_S)

    async def _list(self, kind: str) -> str:
        found = await self.api.call("GET", path_of(kind))
        for item in found.get("items") or ():
            self._take(kind, "MODIFIED", item)
        version: str = found["metadata"]["resourceVersion"]
        return version

    def _take(self, kind: str, what: str, manifest: Manifest) -> None:
        typed = {"apiVersion": RESOURCES[kind].api_version, "kind": kind, **manifest}
        key, version = ref(typed), resource_version(typed)
        if version <= self._newest.get(key, 0):
            return
        self._newest[key] = version
        typed["metadata"].pop("managedFields", None)
        self.scenes[key.namespace].see(Event(version, what, key, typed))
