"""Everything that takes part: cluster, nodes, operator, controllers, and what has been seen."""

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tests.support.kube.api_client import ApiClient, connect_client

from operator_bench.api import GROUP, Object, Say, all_of, condition, follow, ticks, until_none
from operator_bench.manifests import NAMESPACE, PODS_PER_NODE, node
from operator_bench.operator_process import Metrics, Operator
from operator_bench.testbed import ROOT, Testbed, processor_s

RUNS = f"{GROUP}/namespaces/{NAMESPACE}/rlruns"
POOLS = f"{GROUP}/namespaces/{NAMESPACE}/envpools"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
BENCH = Path(__file__).parents[1]
LIMIT_S = 1_800


@dataclass(slots=True)
class Seen:
    """What a watch of runs and pools has brought, by kind and name."""

    newest: dict[tuple[str, str], Object] = field(default_factory=dict)
    observed_s: dict[tuple[str, str], float] = field(default_factory=dict)
    """When the operator first said that an object was as asked for."""
    ready_s: dict[tuple[str, str], float] = field(default_factory=dict)

    def take(self, change: str, found: Object) -> None:
        """One event."""
        key = (found["kind"], found["metadata"]["name"])
        if change == "DELETED":
            self.newest.pop(key, None)
            return
        self.newest[key] = found
        status = found.get("status", {})
        now = time.monotonic()
        if status.get("observedGeneration") == found["metadata"]["generation"]:
            self.observed_s.setdefault(key, now)
        if "True" in {condition(found, "Ready"), condition(found, "Available")}:
            self.ready_s.setdefault(key, now)

    def holds(self, kind: str, name: str, what: str) -> bool:
        """Whether a condition of an object is True now."""
        return condition(self.newest.get((kind, name), {}), what) == "True"


@dataclass(slots=True)
class Scene:
    """What every measurement works with."""

    testbed: Testbed
    api: ApiClient
    operator: Operator
    seen: Seen
    controllers: "subprocess.Popen[bytes]"
    folder: Path
    say: Say

    async def until_none(
        self, left: Callable[[], int], what: str, *, limit_s: float = LIMIT_S, every_s: float = 0.2
    ) -> None:
        """Wait until nothing is left to come.

        Raises:
            TimeoutError: it never came; names it.
        """
        await until_none(left, what, limit_s, self.say, every_s=every_s)

    def start(self, module: str) -> "subprocess.Popen[bytes]":
        """A program of the bench on the cluster's network."""
        return _start(self.testbed, self.folder, module)

    async def metrics(self) -> Metrics:
        """What the operator counts now."""
        return await self.operator.metrics()

    async def make(self, path: str, manifests: list[Object]) -> float:
        """Create objects, many at once; returns when it began."""
        began_s = time.monotonic()
        await all_of(partial(self.api.call, "POST", path, each) for each in manifests)
        return began_s

    def processor_s(self) -> dict[str, float]:
        """CPU seconds of every process until now."""
        ours = {"operator": self.operator.processor_s()}
        ours["controllers"] = processor_s(self.controllers.pid)
        ours["bench"] = time.process_time()
        found = self.testbed.processor_s() | ours
        return {name: round(spent_s, 1) for name, spent_s in found.items()}


@contextlib.asynccontextmanager
async def scene(folder: Path, say: Say, *, pods: int) -> AsyncIterator[Scene]:
    """A cluster with room for so many pods, and our operator at work on it."""
    testbed = Testbed.up()
    try:
        testbed.install()
        async with connect_client(testbed.state, limit_s=None) as api:
            await _prepare(api, pods=pods)
            async with _served(testbed, api, folder, say) as made:
                yield made
    finally:
        testbed.down()


@contextlib.asynccontextmanager
async def _served(testbed: Testbed, api: ApiClient, folder: Path, say: Say) -> AsyncIterator[Scene]:
    operator = Operator(testbed, folder)
    controllers = _start(testbed, folder, "operator_bench.standin")
    seen = Seen()
    operator.start()
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(follow(api, path, seen.take)) for path in (RUNS, POOLS)]
            await until_ready(operator)
            yield Scene(testbed, api, operator, seen, controllers, folder, say)
            for task in tasks:
                task.cancel()
    finally:
        operator.stop()
        controllers.kill()
        controllers.wait(timeout=30)


def _start(testbed: Testbed, folder: Path, module: str) -> "subprocess.Popen[bytes]":
    words = [sys.executable, "-m", module, str(testbed.run / "cluster.json")]
    return testbed.start(words, folder / f"{module}.log", {"PYTHONPATH": f"{BENCH}:{ROOT}"})


async def until_ready(operator: Operator) -> None:
    """Until its caches are filled."""
    async for _ in ticks(0.2):
        if await operator.is_ready():
            return


async def _prepare(api: ApiClient, *, pods: int) -> None:
    labels = {"etude.dev/weak-isolation": "allow"}
    made = {"metadata": {"name": NAMESPACE, "labels": labels}}
    await api.call("POST", "/api/v1/namespaces", made)
    machines = [node(f"machine-{number}") for number in range(pods // PODS_PER_NODE + 10)]
    await all_of(partial(api.call, "POST", "/api/v1/nodes", each) for each in machines)
