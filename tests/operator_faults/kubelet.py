"""A stand-in node: binds pods, says that they are Ready, and ends them when they are to go."""

import asyncio
import contextlib
import itertools
import os
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

import aiohttp
from tests.operator_faults import controllers
from tests.operator_faults.observer import Event, Scenery
from tests.support.kube.api_client import ApiClient, RefusedError, retry_until_answered

from etude.common.api.kinds import RLRun
from etude.operator import names
from etude.operator.kube import workload_controllers as kubernetes_controllers
from etude.operator.kube.rest import path_of
from etude.operator.manifests import Manifest, Ref, is_deleting, labels, ref, uid

NODE = "stand-in"
HEARTBEAT_S = 5.0

_addresses = itertools.count(1)


def address() -> str:
    """A loopback address that no other pod has, be it of tests that run beside these."""
    number = next(_addresses)
    return f"127.{2 + os.getpid() % 250}.{number // 256 % 256}.{number % 256}"


async def join(api: ApiClient) -> None:
    """Make the node."""
    await api.call("POST", "/api/v1/nodes", {"metadata": {"name": NODE}})
    ready = {"type": "Ready", "status": "True", "reason": "KubeletReady"}
    status = {"status": {"conditions": [ready], "capacity": {"pods": "10000"}}}
    path = f"/api/v1/nodes/{NODE}/status"
    await api.call("PATCH", path, status, content="application/merge-patch+json")


async def beat(api: ApiClient) -> None:
    """Keep the node alive, until cancelled."""
    leases = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
    spec = {"holderIdentity": NODE, "leaseDurationSeconds": 40}
    while True:
        now = {"renewTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")}
        body = {"metadata": {"name": NODE}, "spec": spec | now}
        with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError, AssertionError):
            try:
                patch = "application/merge-patch+json"
                await api.call("PATCH", f"{leases}/{NODE}", body, content=patch)
            except AssertionError:
                await api.call("POST", leases, body)
        await asyncio.sleep(HEARTBEAT_S)


@dataclass(slots=True)
class Kubelet:
    """The pods of one namespace."""

    api: ApiClient
    scenery: Scenery
    tasks: asyncio.TaskGroup
    stores: defaultdict[str, controllers.Kept] = field(
        default_factory=lambda: defaultdict(controllers.Kept)
    )
    """By the uid of the run."""
    leased: set[str] = field(default_factory=set)
    """Names of nodes that hold a lease."""
    _running: dict[str, "asyncio.Task[None]"] = field(default_factory=dict)
    _ending: set[str] = field(default_factory=set)

    def hear(self, event: Event) -> None:
        """One change of one object."""
        if event.ref.kind != "Pod":
            return
        if event.type == "DELETED":
            self._stop(uid(event.manifest))
        elif is_deleting(event.manifest):
            self._end(event.manifest)
        elif uid(event.manifest) not in self._running:
            task = self.tasks.create_task(self._live(event.manifest), name=event.ref.name)
            self._running[uid(event.manifest)] = task

    def stop(self) -> None:
        """End every process."""
        for each in list(self._running):
            self._stop(each)

    def _stop(self, gone: str) -> None:
        task = self._running.pop(gone, None)
        if task is not None:
            task.cancel()

    def _end(self, pod: Manifest) -> None:
        if uid(pod) not in self._ending:
            self._ending.add(uid(pod))
            self.tasks.create_task(self._terminate(pod), name=f"end-{ref(pod).name}")

    async def _terminate(self, pod: Manifest) -> None:
        self._stop(uid(pod))
        options = {"gracePeriodSeconds": 0, "preconditions": {"uid": uid(pod)}}
        await _patiently(lambda: self.api.delete(ref(pod), **options))

    async def _live(self, pod: Manifest) -> None:
        """One pod from its creation on."""
        where = address()
        key = ref(pod)
        if not pod["spec"].get("nodeName"):
            path = path_of("Pod", key.namespace, key.name, "binding")
            target = {"apiVersion": "v1", "kind": "Node", "name": NODE}
            binding = {"metadata": {"name": key.name}, "target": target}
            await _patiently(lambda: self.api.call("POST", path, binding))
        role = controllers.role(pod)
        if role == names.JANITOR:
            await self._say(key, _succeeded(pod))
            return
        ready = {**kubernetes_controllers.ready_status(pod), "podIP": where}
        async with asyncio.TaskGroup() as group:
            serving = self._process(pod, role, where)
            if serving is not None:
                group.create_task(serving)
            await self._say(key, ready | {"podIPs": [{"ip": where}]})

    def _process(self, pod: Manifest, role: str, where: str):
        if role == names.BROKER:
            return controllers.serve_pool(where, self.leased)
        if role != names.TRAINER:
            return None
        run = Ref("RLRun", ref(pod).namespace, labels(pod)[names.RUN])
        found = RLRun.model_validate(self.scenery.objects[run])
        kept = self.stores[found.metadata.uid]
        return controllers.Controller(found, kept, self.scenery).serve(where)

    async def _say(self, key: Ref, status: Manifest) -> None:
        await _patiently(lambda: self.api.merge(key, {"status": status}, "status"))


def _succeeded(pod: Manifest) -> Manifest:
    ended = {"exitCode": 0, "reason": "Completed"}
    containers = [
        {"name": each["name"], "ready": False, "state": {"terminated": ended}}
        for each in pod["spec"]["containers"]
    ]
    return {"phase": "Succeeded", "containerStatuses": containers}


async def _patiently(call: Callable[[], Awaitable[object]]) -> None:
    """Until the API server answers; a pod that is gone needs nothing more.

    Raises:
        RefusedError: the API server says no.
    """
    try:
        await retry_until_answered(call)
    except RefusedError as error:
        if error.status not in {404, 409}:
            raise
