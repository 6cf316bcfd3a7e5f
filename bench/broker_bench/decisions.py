"""Placements by one broker on one core, open loop: clients, nodes and broker in one process."""

import asyncio
import os
import resource
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from typing_extensions import override

from broker_bench.core_time import core_time
from etude.common.api.pool.spec import EnvPoolSpec, Template
from etude.envserver.broker.broker import REBUILD_S, Broker
from etude.envserver.broker.host_client import HostClient
from etude.envserver.broker.server import GarbageCollector
from etude.v1 import environments_pb2

NODES, SLOTS, RUNS, SIBLINGS = 100, 600, 8, 8
TEMPLATES = tuple(f"template-{n}" for n in range(4))
HOLD_S = 6.0
"""How long a rollout keeps its environment: half of all slots are taken at 5,000 a second."""
WARM_UP_S = 4.0


class Outcome(NamedTuple):
    """What an open loop measured."""

    placed: int
    core_s: float
    """That a core of its own would have needed, idle time included."""
    cpu_s: float
    """Of broker, nodes and clients together."""
    wait_ms: Sequence[float]
    """From the moment that a launch was due to each of its leases, ascending."""
    rss_mib: float

    @property
    def per_second(self) -> float:
        return self.placed / self.core_s

    @property
    def per_cpu_second(self) -> float:
        return self.placed / self.cpu_s

    def quantile(self, share: float) -> float:
        """Nearest rank, in ms."""
        return self.wait_ms[min(len(self.wait_ms) - 1, int(share * len(self.wait_ms)))]


@dataclass(slots=True)
class LeanNodes(HostClient):
    """Hold what they are told to; a heartbeat crosses the wire format like a real one."""

    held: dict[str, dict[str, environments_pb2.HeldLease]]

    @override
    async def open(
        self, endpoint: str, request: environments_pb2.OpenEnvironmentsRequest
    ) -> Sequence[environments_pb2.LaunchBatchResponse]:
        mine, outcomes = self.held[endpoint], []
        for held in request.leases:
            held.lease.endpoint = endpoint
            mine[held.lease.lease_id] = held
            outcomes.append(
                environments_pb2.LaunchBatchResponse(index=held.index, lease=held.lease)
            )
        return outcomes

    @override
    async def close(self, endpoint: str, lease_ids: Sequence[str]) -> None:
        for lease_id in lease_ids:
            self.held[endpoint].pop(lease_id, None)

    @override
    async def preempt(self, endpoint: str, lease_ids: Sequence[str], count: int) -> Sequence[str]:
        return ()

    @override
    async def resume(self, endpoint: str, lease_ids: Sequence[str]) -> Sequence[str]:
        return ()

    def beat(self, endpoint: str) -> environments_pb2.HeartbeatRequest:
        told = environments_pb2.HeartbeatRequest(
            node_id=endpoint,
            endpoint=endpoint,
            driver="lean",
            isolation=environments_pb2.ISOLATION_STRONG,
            slots=SLOTS,
            held=self.held[endpoint].values(),
            free_memory_bytes=64 << 30,
            levels=[
                environments_pb2.TemplateLevel(
                    template=name, resident=True, paused_clones=2, spawn_cpu_ms=45, start_p50_ms=48
                )
                for name in TEMPLATES
            ],
        )
        return environments_pb2.HeartbeatRequest.FromString(told.SerializeToString())


@dataclass(slots=True)
class OpenLoop:
    """Launches that are due at fixed times, whatever became of those before."""

    rate: float
    seconds: float
    nodes: LeanNodes = field(init=False)
    broker: Broker = field(init=False)
    waits_ms: list[float] = field(default_factory=list)
    _ends: deque[tuple[float, list[str]]] = field(default_factory=deque)
    _measured_from_s: float = 0.0

    def __post_init__(self) -> None:
        self.nodes = LeanNodes({f"node-{n}": {} for n in range(NODES)})
        spec = EnvPoolSpec(templates=tuple(Template(name=name) for name in TEMPLATES))
        self.broker = Broker(spec, self.nodes, started_s=time.monotonic() - 2 * REBUILD_S)

    async def run(self) -> Outcome:
        """Warm up, then measure."""
        for name in self.nodes.held:
            self.broker.heartbeat(self.nodes.beat(name))
        stop = asyncio.Event()
        pauses = GarbageCollector(lambda: not len(self.broker.queue))
        async with asyncio.TaskGroup() as helpers:
            helpers.create_task(self.broker.run(stop))
            helpers.create_task(pauses.run(stop))
            helpers.create_task(self._beat(stop))
            helpers.create_task(self._release(stop))
            await self._launch_for(WARM_UP_S)
            self.waits_ms.clear()
            core_s, cpu_s = time.monotonic(), time.process_time()
            await self._launch_for(self.seconds)
            core_s, cpu_s = time.monotonic() - core_s, time.process_time() - cpu_s
            stop.set()
        rss_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        return Outcome(len(self.waits_ms), core_s, cpu_s, sorted(self.waits_ms), rss_mib)

    async def _launch_for(self, seconds: float) -> None:
        started_s = time.monotonic()
        async with asyncio.TaskGroup() as launches:
            for number in range(int(seconds * self.rate / SIBLINGS)):
                due_s = started_s + number * SIBLINGS / self.rate
                # Also when late: others must have their turn.
                await asyncio.sleep(max(0.0, due_s - time.monotonic()))
                launches.create_task(self._launch(f"{started_s}-{number}", number, due_s))

    async def _launch(self, key: str, number: int, due_s: float) -> None:
        request = environments_pb2.LaunchBatchRequest(
            run_id=f"run-{number % RUNS}",
            idempotency_key=key,
            group_id=key,
            template=TEMPLATES[number // RUNS % len(TEMPLATES)],
            workspace=environments_pb2.WorkspaceSource(uri="s3://tasks/one"),
            count=SIBLINGS,
            toolset="Compact",
        )
        leases = []
        async for outcome in self.broker.launch(request):
            self.waits_ms.append(1000 * (time.monotonic() - due_s))
            leases.append(outcome.lease.lease_id)
        self._ends.append((time.monotonic() + HOLD_S, leases))

    async def _beat(self, stop: asyncio.Event) -> None:
        """Each node once a second, evenly."""
        names, number, started_s = list(self.nodes.held), 0, time.monotonic()
        while not stop.is_set():
            self.broker.heartbeat(self.nodes.beat(names[number % NODES]))
            number += 1
            await asyncio.sleep(max(0.0, started_s + number / NODES - time.monotonic()))

    async def _release(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            over = []
            while self._ends and self._ends[0][0] <= time.monotonic():
                over += self._ends.popleft()[1]
            if over:
                await self.broker.release(over)
            await asyncio.sleep(0.02)


def measure(rate: float, seconds: float, core: int) -> Outcome:
    """Placements on one core."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        with core_time() as runner:
            return runner.run(OpenLoop(rate, seconds).run())
    finally:
        os.sched_setaffinity(0, allowed)
