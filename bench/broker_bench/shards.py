"""Two brokers as processes, a hundred nodes that answer over gRPC, and one broker killed."""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from socket import socket
from typing import NamedTuple

import grpc
from typing_extensions import override

from etude.common.pools import broker_shards
from etude.common.rpc import channels
from etude.common.rpc import server as rpc_server
from etude.trainer.rollouts.leases import Leases
from etude.v1 import environments_pb2, environments_pb2_grpc

NODES, SLOTS, SIBLINGS = 100, 600, 8
BROKERS = 2
RUNS = tuple(f"run-{n}" for n in range(8))
OUTAGE_S = 120.0
START_S = 60.0
HELD = 200
"""Environments that are held through the kill."""


@dataclass(slots=True)
class SimulatedNode(environments_pb2_grpc.EnvNodeServiceServicer):
    """Holds leases and says so; there are no environments behind them."""

    name: str
    endpoint: str = ""
    held: dict[str, environments_pb2.HeldLease] = field(default_factory=dict)

    @override
    async def OpenEnvironments(
        self, request: environments_pb2.OpenEnvironmentsRequest, context: object
    ) -> environments_pb2.OpenEnvironmentsResponse:
        answer = environments_pb2.OpenEnvironmentsResponse()
        for held in request.leases:
            if len(self.held) >= SLOTS:
                answer.outcomes.add(index=held.index).failure.reason = "NoSlot"
                continue
            held.lease.endpoint = self.endpoint
            self.held[held.lease.lease_id] = held
            answer.outcomes.add(index=held.index, lease=held.lease)
        return answer

    @override
    async def CloseEnvironments(
        self, request: environments_pb2.CloseEnvironmentsRequest, context: object
    ) -> environments_pb2.CloseEnvironmentsResponse:
        for lease_id in request.lease_ids:
            self.held.pop(lease_id, None)
        return environments_pb2.CloseEnvironmentsResponse()

    def beat(self) -> environments_pb2.HeartbeatRequest:
        """What its broker is told."""
        return environments_pb2.HeartbeatRequest(
            node_id=self.name,
            endpoint=self.endpoint,
            driver="simulated",
            isolation=environments_pb2.ISOLATION_STRONG,
            slots=SLOTS,
            held=self.held.values(),
        )


def _node(number: int) -> SimulatedNode:
    return SimulatedNode(f"node-{number}")  # type: ignore[abstract]  # the other calls never come


class Survival(NamedTuple):
    """What became of everybody when one of two brokers was killed."""

    held_lost: int
    """Leases from before the kill that could not be renewed after it."""
    doubled: int
    """Leases on two nodes."""
    failed: int
    """Launches that ended without all their leases."""
    launches: int
    back_s: float
    """From the killed broker's new start until it granted again."""
    other_p99_ms: float
    """Wait for a batch at the broker that lived, from the kill to the end."""
    killed_worst_s: float
    """Longest wait for a batch of a run of the killed one."""


class Wait(NamedTuple):
    """One batch."""

    broker: int
    due_s: float
    wait_s: float


class Throughput(NamedTuple):
    """Placements over gRPC with as many launches under way as it takes."""

    placed: int
    wall_s: float
    broker_cpu_s: float


@dataclass(slots=True)
class World:
    """Brokers on one core; nodes and clients in this process."""

    folder: Path
    core: int
    nodes: list[SimulatedNode] = field(default_factory=list)
    brokers: dict[int, "subprocess.Popen[bytes]"] = field(default_factory=dict)
    ports: list[int] = field(default_factory=list)
    _servers: list[rpc_server.Server] = field(default_factory=list)
    _channels: list[grpc.aio.Channel] = field(default_factory=list)
    _tasks: list["asyncio.Task[None]"] = field(default_factory=list)

    async def start(self) -> None:
        """Everything up, and every node known."""
        spec = {"templates": [{"name": "python"}], "slotsPerReplica": SLOTS}
        pool = {"name": "bench", "uid": "u", "spec": spec}
        (self.folder / "pool.json").write_text(json.dumps(pool))
        for number in range(NODES):
            node, server = _node(number), rpc_server.Server([])
            environments_pb2_grpc.add_EnvNodeServiceServicer_to_server(node, server.grpc_server)
            await server.start()
            node.endpoint = f"127.0.0.1:{server.port}"
            self.nodes.append(node)
            self._servers.append(server)
        # Only now: a node might have taken one.
        self.ports += [free_port() for _ in range(2 * BROKERS)]
        for index in range(BROKERS):
            self.start_broker(index)
        self._start_beating()
        for index in range(BROKERS):
            await self.granted(index)

    def start_broker(self, index: int) -> None:
        """As the operator would, on the one core."""
        environment = {
            "PATH": os.environ["PATH"],
            "ETUDE_POOL_FILE": str(self.folder / "pool.json"),
            "ETUDE_PORT": str(self.ports[index]),
            "ETUDE_PROBE_PORT": str(self.ports[BROKERS + index]),
            "ETUDE_POD": f"broker-{index}",
            "ETUDE_BROKER_TARGET": ",".join(f"127.0.0.1:{port}" for port in self.ports[:BROKERS]),
        }
        command = [sys.executable, "-m", "etude.envserver.main", "broker"]
        with (self.folder / f"broker-{index}.log").open("ab") as log:
            self.brokers[index] = subprocess.Popen(command, env=environment, stderr=log)
        os.sched_setaffinity(self.brokers[index].pid, {self.core})

    def kill(self, index: int) -> None:
        """As kill -9 does."""
        self.brokers[index].kill()
        self.brokers[index].wait()

    def leases(self, index: int) -> Leases:
        """A rollout worker's client of one broker."""
        return Leases(self.stub(index), outage_s=OUTAGE_S)

    def stub(self, index: int) -> "environments_pb2_grpc.EnvBrokerServiceAsyncStub":
        """A channel of its own."""
        channel = channels.dial(f"127.0.0.1:{self.ports[index]}", max_backoff_ms=1_000)
        self._channels.append(channel)
        return environments_pb2_grpc.EnvBrokerServiceStub(channel)

    async def granted(self, index: int) -> float:
        """Seconds until a broker grants."""
        started_s, leases = time.perf_counter(), self.leases(index)
        async with asyncio.timeout(START_S):
            await launched(leases, RUNS[index], f"probe-{started_s}", count=1, release=True)
        await leases.close()
        return time.perf_counter() - started_s

    async def stop(self) -> None:
        """Everything down."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for index in self.brokers:
            self.kill(index)
        for channel in self._channels:
            await channel.close()
        for server in self._servers:
            await server.stop(0)

    def _start_beating(self) -> None:
        """Every node tells its broker once a second, each at its own moment, or another one."""
        stubs = [self.stub(index) for index in range(BROKERS)]
        for number, node in enumerate(self.nodes):
            beat = _beat(node, stubs, number / NODES)
            self._tasks.append(asyncio.create_task(beat))


async def _beat(
    node: SimulatedNode,
    stubs: "Sequence[environments_pb2_grpc.EnvBrokerServiceAsyncStub]",
    delay_s: float,
) -> None:
    await asyncio.sleep(delay_s)
    names = [f"broker-{index}" for index in range(len(stubs))]
    home = present = names.index(broker_shards.choose_shard(node.name, names))
    while True:
        try:
            answer = await stubs[present].Heartbeat(node.beat(), timeout=2.0)
        except grpc.aio.AioRpcError:
            answer = environments_pb2.HeartbeatResponse()  # the next one is on its way
            present = (present + 1) % len(stubs)
        if present != home and len(answer.shards) == len(stubs):
            moved = environments_pb2.HeartbeatRequest(
                node_id=node.name, endpoint=node.endpoint, moved_to=names[home]
            )
            await stubs[present].Heartbeat(moved, timeout=2.0)
            present = home
        for lease_id in answer.close_lease_ids:
            node.held.pop(lease_id, None)
        await asyncio.sleep(1.0)


async def launched(
    leases: Leases, run: str, key: str, *, count: int = SIBLINGS, release: bool
) -> list[environments_pb2.Lease]:
    """One batch, as a rollout worker launches it."""
    request = environments_pb2.LaunchBatchRequest(
        run_id=run,
        idempotency_key=key,
        group_id=key,
        template="python",
        workspace=environments_pb2.WorkspaceSource(uri="s3://tasks/one"),
        count=count,
        toolset="Compact",
        ttl_seconds=3_600,
        queue_timeout_seconds=600,
    )
    found = [each.lease async for each in leases.launch(request) if each.lease is not None]
    if release:
        leases.release([lease.lease_id for lease in found])
    return found


async def throughput(world: World, *, seconds: float, at_once: int) -> Throughput:
    """Closed loop against broker 0."""
    leases = world.leases(0)
    until_s, placed = time.perf_counter() + seconds, 0

    async def client(number: int) -> None:
        nonlocal placed
        turn = 0
        while time.perf_counter() < until_s:
            turn += 1
            found = await launched(
                leases, RUNS[number % len(RUNS)], f"{number}-{turn}", release=True
            )
            placed += len(found)

    keeper = asyncio.create_task(leases.keep_alive())
    wall_s, cpu_s = time.perf_counter(), process_cpu_s(world.brokers[0].pid)
    await asyncio.gather(*(client(number) for number in range(at_once)))
    wall_s = time.perf_counter() - wall_s
    cpu_s = process_cpu_s(world.brokers[0].pid) - cpu_s
    keeper.cancel()
    await leases.close()
    return Throughput(placed, wall_s, cpu_s)


@dataclass(slots=True)
class Kill:
    """Launches at a rate from all runs, while broker 1 is killed and started again."""

    world: World
    rate: float
    seconds: float
    clients: list[Leases] = field(init=False)
    failed: int = 0
    back_s: float = 0.0
    _waits: list[Wait] = field(default_factory=list)
    _killed_s: float = 0.0

    def __post_init__(self) -> None:
        self.clients = [self.world.leases(index) for index in range(BROKERS)]

    async def run(self) -> Survival:
        """A third of the time before the kill, the rest after it."""
        keepers = [asyncio.create_task(each.keep_alive()) for each in self.clients]
        kept = await _hold(self.clients)
        launches = int(self.seconds * self.rate / SIBLINGS)
        started_s = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._kill(started_s + self.seconds / 3))
            for number in range(launches):
                due_s = started_s + number * SIBLINGS / self.rate
                await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
                tasks.create_task(self._launch(number, due_s))
        lost = await _missing(self.world, kept)
        for task in keepers:
            task.cancel()
        for each in self.clients:
            await each.close()
        others = [w.wait_s for w in self._waits if w.broker == 0 and w.due_s >= self._killed_s]
        return Survival(
            held_lost=lost,
            doubled=_doubled(self.world.nodes),
            failed=self.failed,
            launches=launches,
            back_s=self.back_s,
            other_p99_ms=1000 * sorted(others)[int(0.99 * len(others))],
            killed_worst_s=max(w.wait_s for w in self._waits if w.broker == 1),
        )

    async def _launch(self, number: int, due_s: float) -> None:
        run = RUNS[number % len(RUNS)]
        index = number // len(RUNS) % BROKERS
        found = await launched(self.clients[index], run, f"survive-{number}", release=True)
        self.failed += len(found) < SIBLINGS
        self._waits.append(Wait(index, due_s, time.perf_counter() - due_s))

    async def _kill(self, at_s: float) -> None:
        await asyncio.sleep(max(0.0, at_s - time.perf_counter()))
        self.world.kill(1)
        self._killed_s = time.perf_counter()
        await asyncio.sleep(1.0)
        again_s = time.perf_counter()
        self.world.start_broker(1)
        await self.world.granted(1)
        self.back_s = time.perf_counter() - again_s


async def _hold(clients: Sequence[Leases]) -> list[tuple[int, str]]:
    """Leases that stay: broker and id."""
    kept: list[tuple[int, str]] = []
    for number in range(HELD // SIBLINGS):
        run = RUNS[number % len(RUNS)]
        index = number // len(RUNS) % BROKERS
        found = await launched(clients[index], run, f"held-{number}", release=False)
        kept += [(index, lease.lease_id) for lease in found]
    return kept


async def _missing(world: World, kept: Iterable[tuple[int, str]]) -> int:
    missing, kept = 0, list(kept)
    for index in range(BROKERS):
        ids = [lease_id for each, lease_id in kept if each == index]
        request = environments_pb2.RenewLeasesRequest(lease_ids=ids, ttl_seconds=60)
        missing += len((await world.stub(index).RenewLeases(request)).missing_lease_ids)
    return missing


def _doubled(nodes: Sequence[SimulatedNode]) -> int:
    ids = [lease_id for node in nodes for lease_id in node.held]
    return len(ids) - len(set(ids))


def process_cpu_s(pid: int) -> float:
    """CPU time of all threads of a process, from its clock: clock_getcpuclockid(3)."""
    return time.clock_gettime(~pid << 3 | 2)


def free_port() -> int:
    """One that nobody listens on now."""
    with socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
