"""The operator as a process, with the environment and the account that the chart gives its pod."""

import asyncio
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import aiohttp
from prometheus_client.parser import text_string_to_metric_families
from tests.support.kube import operator_process, testbeds
from tests.support.kube.operator_process import OperatorProcess

from operator_bench.testbed import Testbed, memory_mib, processor_s

POD = "etude-operator-bench"
PORT = 8080
WRITES = {"POST", "PATCH", "PUT", "DELETE"}


class Sample(NamedTuple):
    """One series of /metrics."""

    name: str
    labels: dict[str, str]
    value: float


class Operator:
    """One operator, started and ended as often as wanted."""

    def __init__(self, testbed: Testbed, folder: Path) -> None:
        self._testbed, self._folder = testbed, folder
        self._running: OperatorProcess | None = None
        self._url = f"http://{testbed.state['node_ip']}:{PORT}"
        kubectl = testbeds.program(testbed.state, "kubectl")
        self._environment = operator_process.chart_environment(
            kubectl, testbed.state, folder, pod=POD, port=PORT
        )

    @property
    def pid(self) -> int:
        """Of the process that runs now.

        Raises:
            RuntimeError: none does.
        """
        if self._running is None or not self._running.is_running:
            raise RuntimeError(f"the operator ended: see {self.log}")
        return self._running.process.pid

    @property
    def log(self) -> Path:
        """What it says."""
        return self._folder / "operator.log"

    def start(self) -> None:
        """Start it."""
        self._running = operator_process.start_operator(
            self._environment, self.log, self._url, prefix=self._testbed.network
        )

    def stop(self, number: int = signal.SIGTERM) -> None:
        """End it, and wait for its end.

        Raises:
            TimeoutExpired: it did not end when it was told to; it was killed.
        """
        if self._running is not None:
            running, self._running = self._running, None
            running.stop(number)

    def processor_s(self) -> float:
        """Its CPU seconds until now."""
        return processor_s(self.pid)

    def memory_mib(self, field: str = "VmRSS") -> float:
        """Its memory."""
        return memory_mib(self.pid, field)

    async def metrics(self) -> "Metrics":
        """What it counts at this moment."""
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{self._url}/metrics", timeout=aiohttp.ClientTimeout(30)) as answer,
        ):
            return Metrics(tuple(_samples(await answer.text())), time.monotonic())

    async def is_ready(self) -> bool:
        """True if its caches are filled."""
        return self._running is not None and await asyncio.to_thread(
            lambda running: running.is_ready, self._running
        )


class Metrics(NamedTuple):
    """One reading of /metrics."""

    samples: tuple[Sample, ...]
    at_s: float

    def total(self, name: str, **labels: str) -> float:
        """The sum of a series over every label that is not given."""
        return sum(
            each.value
            for each in self.samples
            if each.name == name and labels.items() <= each.labels.items()
        )

    def writes(self) -> float:
        """Requests that change something, but for the leader's renewals."""
        return sum(
            each.value
            for each in self.samples
            if each.name == "etude_api_requests_total"
            and each.labels["verb"] in WRITES
            and each.labels["resource"] != "leases"
        )

    def written(self) -> dict[str, float]:
        """Writes by verb and resource, but for the leader's renewals."""
        found: dict[str, float] = {}
        for each in self.samples:
            if each.name != "etude_api_requests_total" or each.labels["verb"] not in WRITES:
                continue
            if each.labels["resource"] != "leases":
                key = f"{each.labels['verb']} {each.labels['resource']} {each.labels['code']}"
                found[key] = found.get(key, 0) + each.value
        return found

    def quantile_ms(self, before: "Metrics", name: str, share: float, **labels: str) -> float:
        """A quantile of a histogram since an earlier reading, as its buckets tell, in ms."""
        steps: dict[float, float] = {}
        for reading, sign in ((self, 1), (before, -1)):
            for each in reading.samples:
                if each.name == f"{name}_bucket" and labels.items() <= each.labels.items():
                    limit = float(each.labels["le"])
                    steps[limit] = steps.get(limit, 0) + sign * each.value
        return 1000 * _quantile(sorted(steps.items()), share)


def _quantile(steps: list[tuple[float, float]], share: float) -> float:
    """By interpolation inside the bucket, as Prometheus does."""
    wanted = share * steps[-1][1] if steps else 0
    below, reached = 0.0, 0.0
    for limit, count in steps:
        if count >= wanted and count > reached:
            if limit == float("inf"):
                return below
            return below + (limit - below) * (wanted - reached) / (count - reached)
        below, reached = limit, count
    return below


def _samples(text: str) -> Iterator[Sample]:
    for family in text_string_to_metric_families(text):
        for each in family.samples:
            yield Sample(each.name, dict(each.labels), float(each.value))
