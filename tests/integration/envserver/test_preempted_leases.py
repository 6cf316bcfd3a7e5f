"""Rollouts that wait for people's sandboxes: over gRPC, and while broker and host are killed."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import grpc
import pytest
from tests.support.environments.pool_client import Pool
from tests.support.environments.pool_processes import START_TIMEOUT_S, Processes

from etude.v1 import environments_pb2

_T = TypeVar("_T")

SERVING = environments_pb2.LEASE_CLASS_SERVING
SLOTS = 4
FLOOR = {"classes": [{"name": "Serving", "floorSlots": 2, "headroomSeconds": 0}]}
Driver = Any  # the fixture only proves that this machine allows namespaces


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    made = Processes(tmp_path)
    made.lease = FLOOR
    made.write_pool("Process", "Trusted")
    yield made
    for process in made.running.values():
        process.kill()
        process.wait()


async def started(
    processes: Processes, connect: Callable[..., Pool], source: str
) -> tuple[Pool, list[environments_pb2.Lease]]:
    """Rollouts in every slot, each of which has written its number."""
    await restart(processes)
    pool = connect(f"127.0.0.1:{processes.ports['broker']}", source)
    pool.toolset = "Standard"
    leases = await pool.launch("rollouts", SLOTS)
    for number, lease in enumerate(leases):
        await pool.turn(lease, ("1", "write_file", {"path": "number", "content": str(number)}))
    return pool, leases


async def answered(call: Callable[[], Awaitable[_T]]) -> _T:
    """What a client does while a service is away, or a lease waits: the same call again.

    Raises:
        AioRpcError: the service is there and refuses.
    """
    async with asyncio.timeout(START_TIMEOUT_S):
        while True:
            try:
                return await call()
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
                await asyncio.sleep(0.1)


async def renew(pool: Pool, leases: list[environments_pb2.Lease]) -> None:
    """What holders do every 15 s; a broker that starts answers once it knows all hosts."""
    request = environments_pb2.RenewLeasesRequest(lease_ids=[each.lease_id for each in leases])
    answer = await answered(lambda: pool.broker.RenewLeases(request, timeout=pool.deadline_s))
    assert not answer.missing_lease_ids


async def release(pool: Pool, leases: list[environments_pb2.Lease]) -> None:
    request = environments_pb2.ReleaseLeasesRequest(lease_ids=[each.lease_id for each in leases])
    await answered(lambda: pool.broker.ReleaseLeases(request, timeout=pool.deadline_s))


async def restart(processes: Processes) -> None:
    for role in ("broker", "node"):
        processes.start(role)
    for role in ("broker", "node"):
        await processes.ready(role)


async def number_of(pool: Pool, lease: environments_pb2.Lease) -> str:
    """What a rollout has written, once it has a slot again."""
    (written,) = (await answered(lambda: pool.diff(lease))).written
    return written.content.decode()


async def num_waiting(pool: Pool, leases: list[environments_pb2.Lease]) -> int:
    """Rollouts whose calls are refused for now."""

    async def is_waiting(lease: environments_pb2.Lease) -> bool:
        try:
            await pool.diff(lease)
        except grpc.aio.AioRpcError as error:
            return "another class" in str(error.details())
        return False

    return sum(await asyncio.gather(*map(is_waiting, leases)))


async def test_people_get_their_floor_and_rollouts_go_on_afterwards(
    driver: Driver, processes: Processes, connect: Callable[..., Pool], source: str
) -> None:
    pool, rollouts = await started(processes, connect, source)

    people = await pool.launch("people", 2, lease_class=SERVING)

    assert await num_waiting(pool, rollouts) == 2
    assert await pool.turn(people[0], ("1", "run_terminal", {"command": "echo hi"})) == ["hi"]
    await release(pool, people)
    found = await asyncio.gather(*(number_of(pool, each) for each in rollouts))
    assert found == ["0", "1", "2", "3"]
    assert 'etude_env_preemptions_total{step="resumed"} 2.0' in processes.metrics("node")


@pytest.mark.parametrize("killed", [("broker",), ("node",), ("broker", "node")])
async def test_rollouts_that_wait_outlive_killed_processes(
    driver: Driver,
    processes: Processes,
    connect: Callable[..., Pool],
    source: str,
    killed: tuple[str, ...],
) -> None:
    pool, rollouts = await started(processes, connect, source)
    people = await pool.launch("people", 2, lease_class=SERVING)

    for role in killed:
        processes.kill(role)
    for role in killed:
        processes.start(role)
    for role in killed:
        await processes.ready(role)

    await renew(pool, [*rollouts, *people])
    await release(pool, people)
    found = await asyncio.gather(*(number_of(pool, each) for each in rollouts))
    assert found == ["0", "1", "2", "3"]
