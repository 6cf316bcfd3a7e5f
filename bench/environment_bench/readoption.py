"""A node that is killed: how soon the next one holds all its environments again."""

import asyncio
import contextlib
import signal
import time
from pathlib import Path

import grpc

from environment_bench.goals import Figure
from environment_bench.pool import Client, Pool, running
from environment_bench.starts import READ
from etude.v1 import environments_pb2

IN_A_CALL = 4


async def measure(folder: Path, image: Path, *, count: int) -> list[Figure]:
    """So many frozen environments and four in the middle of a command; each answers afterwards."""
    async with running(folder, image, slots=count + IN_A_CALL) as (pool, client):
        leases = await client.launch(count + IN_A_CALL)
        for lease in leases:
            await client.turn(lease, READ)
        working = [asyncio.create_task(_work(client, lease)) for lease in leases[:IN_A_CALL]]
        await asyncio.sleep(1.0)
        took_s = await _killed(pool)
        await asyncio.gather(*working)
        async with asyncio.timeout(120):
            answered = sum(await asyncio.gather(*(_answers(client, each) for each in leases)))
    return [
        Figure(
            key="readopt_s",
            what=f"kill -9 of the node until all of {count} + {IN_A_CALL} are held",
            value=took_s,
            unit="s",
            goal=2,
            count=1,
            note="the start of the process included",
        ),
        Figure(
            key="readopted",
            what="  answering afterwards",
            value=answered,
            goal=count,
            is_least=True,
            count=count + IN_A_CALL,
            note="calls that were cut off may cost their environment",
        ),
    ]


async def _killed(pool: Pool) -> float:
    """Seconds from the kill until the next process is ready: it takes over before it serves.

    Raises:
        RuntimeError: there was no node.
    """
    if pool.node is None:
        raise RuntimeError("the pool was not started")
    began_s = time.perf_counter()
    pool.node.send_signal(signal.SIGKILL)
    pool.node.wait()
    pool.node = pool.spawn("node")
    await pool.ready("node")
    return time.perf_counter() - began_s


async def _work(client: Client, lease: environments_pb2.Lease) -> None:
    with contextlib.suppress(grpc.aio.AioRpcError):
        await client.turn(lease, ("run_terminal", {"command": "sleep 5"}))


async def _answers(client: Client, lease: environments_pb2.Lease) -> bool:
    while True:
        try:
            (result,) = await client.turn(lease, READ)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                return False
            await asyncio.sleep(0.2)
        else:
            return not result.is_error
