"""Process cluster: a cluster in memory whose pods are processes of this host."""

import asyncio
import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from typing_extensions import override

from etude.common.run_folder.state import LocalPod
from etude.operator.clock import SystemClock
from etude.operator.kube.memory_cluster import Kubelet, MemoryCluster
from etude.operator.local.pod_runner import PodRunner
from etude.operator.local.ports import LOOPBACK, PortRegistry, pod_of_address
from etude.operator.local.process_spec import LocalHost, ProcessSpec, process_spec
from etude.operator.manifests import Manifest, Ref, labels, ref
from etude.operator.names import ROLE

log = logging.getLogger(__name__)

CLOSING_GRACE_S = 5.0
CLOSING_LIMIT_S = 20.0
"""A pod that has not ended after this is left to the kernel, which kills it with this process."""


@dataclass(slots=True)
class ProcessKubelet(Kubelet):
    """Runs every pod as a process, and ends all when its context ends."""

    folder: Path
    base_env: Mapping[str, str]
    ports: PortRegistry = field(default_factory=PortRegistry)
    _runners: dict[Ref, PodRunner] = field(default_factory=dict)
    _tasks: asyncio.TaskGroup = field(default_factory=asyncio.TaskGroup)
    _lives: set[asyncio.Task[None]] = field(default_factory=set)
    _is_hurried: bool = False
    _is_closing: bool = False

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_closing = True
        # The remaining processes have nothing left to do, and the user waits for the prompt.
        loop = asyncio.get_running_loop()
        hurry = loop.call_later(CLOSING_GRACE_S, self.skip_grace)
        give_up = loop.call_later(CLOSING_LIMIT_S, self._give_up)
        for runner in self._runners.values():
            runner.stop(now=self._is_hurried)
        await self._tasks.__aexit__(kind, error, trace)
        hurry.cancel()
        give_up.cancel()

    @override
    def start(self, cluster: MemoryCluster, pod: Manifest) -> None:
        if self._is_closing:
            return
        key = ref(pod)
        runner = PodRunner(
            name=key.name,
            make_spec=lambda: process_spec(pod, self._local_host(cluster, key.namespace)),
            report_status=lambda status: cluster.set_status(key, status),
        )
        self._runners[key] = runner
        # The pod is started from here on, before its first status.
        cluster.set_status(key, {"phase": "Pending"})
        task = self._tasks.create_task(self._run(cluster, key, runner), name=key.name)
        self._lives.add(task)
        task.add_done_callback(self._lives.discard)

    @override
    def stop(self, cluster: MemoryCluster, pod: Manifest) -> None:
        runner = self._runners.get(ref(pod))
        if runner is not None:
            grace_s = pod["metadata"].get("deletionGracePeriodSeconds")
            runner.stop(now=self._is_hurried, grace_s=grace_s)

    def skip_grace(self) -> None:
        self._is_hurried = True
        for runner in self._runners.values():
            runner.skip_grace()

    def _give_up(self) -> None:
        for task in self._lives:
            log.warning("pod %s did not end within %.0f s", task.get_name(), CLOSING_LIMIT_S)
            task.cancel()

    def pods(self, cluster: MemoryCluster) -> list[LocalPod]:
        """All pods in the form of local.json."""
        pods = sorted(cluster.list_objects("Pod"), key=lambda pod: str(pod["metadata"]["name"]))
        return [_local_pod(pod, self._runners.get(ref(pod)), self.folder) for pod in pods]

    async def _run(self, cluster: MemoryCluster, key: Ref, runner: PodRunner) -> None:
        try:
            await runner.run()
        finally:
            del self._runners[key]
        shutil.rmtree(self.folder / "scratch" / key.name, ignore_errors=True)
        cluster.purge(key)

    def _local_host(self, cluster: MemoryCluster, namespace: str) -> LocalHost:
        def config_map(name: str) -> Mapping[str, str]:
            found = cluster.get(Ref("ConfigMap", namespace, name))
            if found is None:
                raise KeyError(f"ConfigMap {name} does not exist yet")
            data: Mapping[str, str] = found["data"]
            return data

        return LocalHost(
            folder=self.folder,
            ports=self.ports,
            config_map=config_map,
            is_service=lambda name: cluster.get(Ref("Service", namespace, name)) is not None,
            base_env=self.base_env,
        )


@dataclass(slots=True)
class ProcessCluster(MemoryCluster):
    """A cluster of one host: Services are loopback ports, volumes are folders."""

    @override
    def address(self, namespace: str, target: str) -> str:
        host, _, port = target.rpartition(":")
        pod = pod_of_address(
            host, is_service=lambda name: self.get(Ref("Service", namespace, name)) is not None
        )
        assert isinstance(self.kubelet, ProcessKubelet)  # noqa: S101 - built so by local.py
        return target if pod is None else f"{LOOPBACK}:{self.kubelet.ports.port(pod, int(port))}"


def process_cluster(kubelet: ProcessKubelet) -> ProcessCluster:
    """Create a cluster over a kubelet, with the system clock."""
    return ProcessCluster(clock=SystemClock(), kubelet=kubelet)


def _local_pod(pod: Manifest, runner: PodRunner | None, folder: Path) -> LocalPod:
    container: Manifest = next(iter(pod.get("status", {}).get("containerStatuses", ())), {})
    waiting = container.get("state", {}).get("waiting")
    plan: ProcessSpec | None = runner.spec if runner else None
    return LocalPod(
        name=pod["metadata"]["name"],
        role=labels(pod).get(ROLE, ""),
        state=_state(pod, is_waiting=waiting is not None, is_ready=container.get("ready", False)),
        restarts=container.get("restartCount", 0),
        pid=runner.child.pid if runner and runner.child else None,
        ports=dict(plan.ports) if plan else {},
        log=str(plan.log.relative_to(folder)) if plan else "",
        message=waiting["message"] if waiting else "",
    )


def _state(pod: Manifest, *, is_waiting: bool, is_ready: bool) -> str:
    phase = pod.get("status", {}).get("phase", "Pending")
    if phase in {"Pending", "Succeeded", "Failed"}:
        return "Pending" if phase == "Pending" else "Stopped"
    if is_waiting:
        return "BackOff"
    return "Ready" if is_ready else "Starting"
