"""Clients of one run: fill the pool, go on launching and releasing, and lose a broker meanwhile."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import grpc

from etude.common.rpc.broker_channel import BrokerChannel, dial_brokers
from etude.trainer.rollouts.leases import Leases
from etude.v1 import environments_pb2, environments_pb2_grpc
from scale_bench.brokers import BrokerProcesses
from scale_bench.nodes import SimulatedNodes

RUN = "run"
SIBLINGS = 16
AT_ONCE = 16
"""Batches under way."""
OUTAGE_S = 120.0
START_S = 120.0
SETTLE_S = 60.0
RENEW_AT_ONCE = 2_000
"""Leases in one call."""


class Placed(NamedTuple):
    """Placements of one phase."""

    num: int
    wall_s: float
    broker_cpu_s: float
    wait_ms: Sequence[float]
    """From launch to each lease, ascending."""

    @property
    def per_s(self) -> float:
        return self.num / self.wall_s

    def quantile(self, share: float) -> float:
        """Nearest rank, in ms; 0 without samples."""
        if not self.wait_ms:
            return 0.0
        return self.wait_ms[min(len(self.wait_ms) - 1, int(share * len(self.wait_ms)))]


@dataclass(slots=True)
class PhaseClock:
    """Wall time of a phase, and CPU time of the brokers that live through it."""

    brokers: BrokerProcesses
    _began_s: float = field(default_factory=time.perf_counter)
    _cpu_s: dict[int, float] = field(init=False)

    def __post_init__(self) -> None:
        self._cpu_s = self.brokers.cpu_s

    def placed(self, waits: Sequence[float]) -> Placed:
        """The phase, which ends now."""
        wall_s = time.perf_counter() - self._began_s
        cpu_s = sum(now - self._cpu_s.get(pid, 0.0) for pid, now in self.brokers.cpu_s.items())
        return Placed(len(waits), wall_s, cpu_s, sorted(waits))


class Loss(NamedTuple):
    """What became of the run when one broker was killed."""

    held: int
    """Leases at the kill that nobody released."""
    lost: int
    """Of them, those that no broker knew at the end."""
    doubled: int
    """Leases that two nodes hold."""
    failed: int
    """Launches that ended without all their leases."""
    moved_s: float
    """Until every node had another broker."""


@dataclass(slots=True)
class Clients:
    """Rollout workers of one run."""

    brokers: BrokerProcesses
    nodes: SimulatedNodes
    channel: BrokerChannel = field(init=False)
    leases: Leases = field(init=False)
    held: list[list[str]] = field(default_factory=list)
    """Lease ids of each batch, the oldest first."""
    failed: int = 0
    _number: int = 0

    def __post_init__(self) -> None:
        self.channel = dial_brokers(",".join(self.brokers.targets))
        stub = environments_pb2_grpc.EnvBrokerServiceStub(self.channel)
        self.leases = Leases(stub, OUTAGE_S)

    async def fill(self, environments: int) -> Placed:
        """Launch until so many are held."""
        waits, clock = list[float](), PhaseClock(self.brokers)
        await self._repeat(lambda: self._launch(waits), environments // SIBLINGS)
        return clock.placed(waits)

    async def churn(self, seconds: float) -> Placed:
        """Release the oldest batch and launch another one, again and again."""
        until_s = time.perf_counter() + seconds
        waits, clock = list[float](), PhaseClock(self.brokers)

        async def turn() -> bool:
            self.leases.release(self.held.pop(0))
            await self._launch(waits)
            return time.perf_counter() < until_s

        await asyncio.gather(*(_while_true(turn) for _ in range(AT_ONCE)))
        return clock.placed(waits)

    async def lose(self, index: int, seconds: float) -> tuple[Placed, Loss]:
        """Kill a broker while the run goes on."""
        target, nodes = self.brokers.targets[index], list(self.nodes.nodes.values())
        churning = asyncio.create_task(self.churn(seconds))
        await asyncio.sleep(seconds / 5)
        self.brokers.kill(index)
        killed_s = time.perf_counter()
        await _wait_until(lambda: all(node.present != target for node in nodes), SETTLE_S)
        moved_s = time.perf_counter() - killed_s
        placed = await churning
        kept = [lease_id for batch in self.held for lease_id in batch]
        lost = await self.missing(kept)
        return placed, Loss(len(kept), lost, self._doubled(), self.failed, moved_s)

    async def missing(self, lease_ids: Sequence[str]) -> int:
        """Renew leases; returns how many are gone."""
        stub, found = environments_pb2_grpc.EnvBrokerServiceStub(self.channel), 0
        for start in range(0, len(lease_ids), RENEW_AT_ONCE):
            request = environments_pb2.RenewLeasesRequest(
                lease_ids=lease_ids[start : start + RENEW_AT_ONCE]
            )
            async with asyncio.timeout(SETTLE_S):
                found += len((await _until_answered(stub, request)).missing_lease_ids)
        return found

    async def wait_for_brokers(self) -> None:
        """Wait until every node has a broker, and each broker knows all others."""
        nodes, count = list(self.nodes.nodes.values()), self.brokers.count
        await _wait_until(lambda: all(len(node.shards) == count for node in nodes), START_S)
        await self.channel.list_shards()

    def _doubled(self) -> int:
        ids = [lease_id for node in self.nodes.nodes.values() for lease_id in node.held]
        return len(ids) - len(set(ids))

    async def _launch(self, waits: list[float]) -> None:
        self._number += 1
        key, started_s, found = f"batch-{self._number}", time.perf_counter(), list[str]()
        request = environments_pb2.LaunchBatchRequest(
            run_id=RUN,
            idempotency_key=key,
            group_id=key,
            template="python",
            workspace=environments_pb2.WorkspaceSource(uri="s3://tasks/one"),
            count=SIBLINGS,
            toolset="Compact",
            queue_timeout_seconds=120,
        )
        async for each in self.leases.launch(request):
            if each.lease is not None:
                found.append(each.lease.lease_id)
                waits.append(1000 * (time.perf_counter() - started_s))
        self.failed += len(found) < SIBLINGS
        self.held.append(found)

    async def _repeat(self, work: Callable[[], Awaitable[None]], times: int) -> None:
        left = times

        async def turn() -> bool:
            nonlocal left
            left -= 1
            if left >= 0:
                await work()
            return left > 0

        await asyncio.gather(*(_while_true(turn) for _ in range(AT_ONCE)))


async def _wait_until(holds: Callable[[], bool], limit_s: float) -> None:
    async with asyncio.timeout(limit_s):
        while not holds():  # noqa: ASYNC110 - nodes say nothing of their own
            await asyncio.sleep(0.05)


async def _while_true(turn: Callable[[], Awaitable[bool]]) -> None:
    while await turn():
        pass


async def _until_answered(
    stub: "environments_pb2_grpc.EnvBrokerServiceAsyncStub",
    request: environments_pb2.RenewLeasesRequest,
) -> environments_pb2.RenewLeasesResponse:
    """Try again while hosts move.

    Raises:
        AioRpcError: anything else went wrong.
    """
    while True:
        try:
            return await stub.RenewLeases(request, timeout=20.0)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            await asyncio.sleep(1.0)
