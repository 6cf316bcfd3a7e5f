"""Four runs ask for hundreds of environments at once: how long, how fair, how many are lost."""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import grpc

from environment_bench.goals import Figure
from environment_bench.pool import Client, running
from environment_bench.starts import READ
from etude.v1 import environments_pb2

RUNS = 4
SLOTS = 256
"""Fewer than are asked for: whose turn it is shows only where somebody waits."""


async def measure(folder: Path, image: Path, *, count: int) -> list[Figure]:
    """Every environment answers one read, and is given back."""
    async with running(folder, image, slots=min(SLOTS, max(RUNS, count // 4))) as (pool, client):
        await client.release(await client.launch())
        before_ms, began_s = pool.cpu_ms(), time.perf_counter()
        shares = await asyncio.gather(
            *(_run(client, f"run-{number}", count // RUNS, began_s) for number in range(RUNS))
        )
        took_s = time.perf_counter() - began_s
        cpu_ms = (pool.cpu_ms() - before_ms) / count
    halves = [sum(end <= took_s / 2 for end in share.ends_s) for share in shares]
    return [
        Figure(
            key="burst1000_s",
            what=f"burst of {count}, drained",
            value=took_s,
            unit="s",
            goal=40 * count / 1000,
            cpu_ms=cpu_ms,
            count=count,
        ),
        Figure(
            key="burst_lost",
            what="  lost",
            value=sum(share.lost for share in shares),
            goal=0,
            count=count,
        ),
        Figure(
            key="jain",
            what="  Jain index over runs at half time",
            value=jain(halves),
            goal=0.95,
            is_least=True,
            count=RUNS,
        ),
    ]


class _Share(NamedTuple):
    """What one run got."""

    ends_s: list[float]
    """When each environment had answered."""
    lost: int


async def _run(client: Client, run_id: str, count: int, began_s: float) -> _Share:
    ends_s: list[float] = []

    async def use(lease: environments_pb2.Lease) -> bool:
        try:
            (result,) = await client.turn(lease, READ)
        except grpc.aio.AioRpcError:
            return False
        ends_s.append(time.perf_counter() - began_s)
        await client.release([lease])
        return not result.is_error

    uses = [
        asyncio.create_task(use(outcome.lease))
        async for outcome in client.outcomes(count, run_id=run_id)
        if outcome.HasField("lease")
    ]
    answered = sum(await asyncio.gather(*uses))
    return _Share(ends_s, count - answered)


def jain(shares: Sequence[float]) -> float:
    """Jain's fairness index, 1 when all are equal: Jain, Chiu and Hawe, DEC-TR-301, 1984."""
    total = sum(each * each for each in shares)
    return sum(shares) ** 2 / (len(shares) * total) if total else 0.0
