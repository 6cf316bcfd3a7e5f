"""Scenes: a namespace with an operator behind a proxy, a stand-in node, and an observer."""

import asyncio
import contextlib
import os
import signal
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.operator_faults import kubelet, operators, oracles
from tests.operator_faults.kubelet import Kubelet
from tests.operator_faults.observer import Observer, Scenery
from tests.operator_faults.operators import Nursery
from tests.operator_faults.proxy import EventFault, Fault, Proxy, proxied
from tests.support.kube.api_client import ApiClient, RefusedError, connect_client
from tests.support.kube.operator_process import write_kubeconfig

from etude.operator.manifests import Manifest, Ref, condition, is_true

LIMIT_S = 240.0
"""Of one plan on a machine that others load; an idle one needs 5 s."""
SHORT = {"etude.operator.service.STATUS_DEBOUNCE_S": 0.5}
"""Constants of operators here: figures are written every half second, so that plans end soon."""


@dataclass(slots=True)
class Scene:
    """One namespace and what happens there."""

    namespace: str
    api: ApiClient
    scenery: Scenery
    kubelet: Kubelet
    nursery: Nursery
    folder: Path
    constants: dict[str, Any] = field(default_factory=lambda: dict(SHORT))
    environment: dict[str, str] = field(default_factory=dict)
    """Of operators, on top of what the chart would set."""
    clock_s: float = 0.0
    ends: list[str] = field(default_factory=list)
    """Ends of operators that no test asked for."""
    _killed: set[int] = field(default_factory=set)

    def ref(self, kind: str, name: str) -> Ref:
        return Ref(kind, self.namespace, name)

    def get(self, kind: str, name: str) -> Manifest:
        """An object, empty while there is none."""
        return self.scenery.objects.get(self.ref(kind, name), {})

    def holds(self, kind: str, name: str, what: str) -> bool:
        """Whether a condition is True now, and of the newest spec."""
        found = self.get(kind, name)
        return bool(found) and is_true(found, what)

    def reason(self, kind: str, name: str, what: str) -> str:
        return str(condition(self.get(kind, name), what).get("reason", ""))

    async def create(self, manifest: Manifest) -> Manifest:
        return await self.api.create(manifest, self.namespace)

    async def merge(self, kind: str, name: str, body: Manifest, subresource: str = "") -> Manifest:
        return await self.api.merge(self.ref(kind, name), body, subresource)

    async def until(self, holds: Any) -> None:
        """Wait for a state.

        Raises:
            TimeoutError: it does not come.
        """
        async with asyncio.timeout(LIMIT_S):
            await self.scenery.until(holds)

    async def api_calls(self, enough: Callable[[], bool]) -> None:
        """Wait for requests of an operator, which change no object.

        Raises:
            TimeoutError: they do not come.
        """
        async with asyncio.timeout(LIMIT_S):
            while not enough():  # noqa: ASYNC110 - a proxy's log is polled
                await asyncio.sleep(0.02)

    def log(self, name: str = "operator") -> str:
        path = self.folder / f"{name}.log"
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def problems(self) -> list[str]:
        """What no history may hold, with faults or without."""
        found = [*self.ends, *oracles.unsafe(self.scenery.ordered())]
        for log in sorted(self.folder.glob("*.log")):
            found += oracles.complaints(log.read_text(encoding="utf-8", errors="replace"))
        return found

    async def start(self, proxy: Proxy, name: str = "operator") -> "Running":
        """An operator behind a proxy."""
        running = Running(self, proxy, name)
        await running.start()
        return running


@dataclass(slots=True)
class Running:
    """One operator; after a kill it can be started again, as a Deployment would."""

    scene: Scene
    proxy: Proxy
    name: str
    pid: int = 0
    starts: int = 0
    _watching: "asyncio.Task[None] | None" = None
    _is_wanted: bool = True

    async def start(self) -> None:
        """Start it once more."""
        scene = self.scene
        config = scene.folder / f"{self.name}.kubeconfig"
        write_kubeconfig(config, {"server": self.proxy.address}, token="none")
        env = operators.environment(pod=self.name, namespace=scene.namespace, kubeconfig=config)
        request = {
            "env": env | scene.environment,
            "log": str(scene.folder / f"{self.name}.log"),
            "constants": scene.constants,
            "clock_s": scene.clock_s,
        }
        self.pid = await scene.nursery.start(request)
        self.starts += 1

    def keep(self, tasks: asyncio.TaskGroup) -> None:
        """Start it again whenever it was killed, from now on."""
        self._watching = tasks.create_task(self._keep(), name=f"keep-{self.name}")

    async def _keep(self) -> None:
        while True:
            code = await self.scene.nursery.ended(self.pid)
            if code != -signal.SIGKILL:
                self.scene.ends.append(f"{self.name} ended with {code}")
            await self.start()

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    async def kill(self) -> None:
        """SIGKILL, and wait for the end; nobody starts it again."""
        self.unkeep()
        self.signal(signal.SIGKILL)
        await self.scene.nursery.ended(self.pid)

    def unkeep(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None


@dataclass(slots=True)
class Lab:
    """What all scenes of a test share."""

    api: ApiClient
    observer: Observer
    nursery: Nursery
    folder: Path
    tasks: asyncio.TaskGroup

    @contextlib.asynccontextmanager
    async def scene(self) -> AsyncIterator[Scene]:
        """A fresh namespace."""
        namespace = f"faults-{uuid.uuid4().hex[:8]}"
        folder = self.folder / namespace
        folder.mkdir()
        scenery = self.observer.scenes[namespace]
        # Of this lab's group: pods outlive the block of their scene by a moment.
        node = Kubelet(self.api, scenery, self.tasks)
        scenery.listeners.append(node.hear)
        labels = {"etude.dev/weak-isolation": "allow"}
        metadata = {"name": namespace, "labels": labels}
        await self.api.call("POST", "/api/v1/namespaces", {"metadata": metadata})
        scene = Scene(namespace, self.api, scenery, node, self.nursery, folder)
        try:
            yield scene
        finally:
            scenery.listeners.clear()
            node.stop()
            self.observer.scenes.pop(namespace, None)

    @contextlib.asynccontextmanager
    async def acting(
        self,
        scene: Scene,
        name: str = "operator",
        *,
        faults: Sequence[Fault] = (),
        event_faults: Sequence[EventFault] = (),
    ) -> AsyncIterator[Running]:
        """An operator behind a proxy of its own, until the end of the block."""
        async with proxied(self.api) as proxy:
            proxy.faults += faults
            proxy.event_faults += event_faults
            running = await scene.start(proxy, name)
            try:
                yield running
            finally:
                await running.kill()


@contextlib.asynccontextmanager
async def laboratory(state: Mapping[str, Any], folder: Path) -> AsyncIterator[Lab]:
    """Over a cluster, until the end of the block."""
    async with (
        connect_client(state) as api,
        operators.nursery() as made,
        asyncio.TaskGroup() as tasks,
    ):
        with contextlib.suppress(RefusedError):  # it joined before
            await kubelet.join(api)
        observer = Observer(api)
        started = asyncio.Event()
        running = [
            tasks.create_task(kubelet.beat(api), name="heartbeat"),
            tasks.create_task(observer.run(started), name="observer"),
        ]
        await started.wait()
        yield Lab(api, observer, made, folder, tasks)
        for task in running:
            task.cancel()
