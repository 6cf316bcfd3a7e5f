"""Four runs ask for hundreds of environments at once: how long, how fair, how many are lost."""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

from environment_bench.goals import Figure
from environment_bench.pool import Client, running
from environment_bench.starts import READ

RUNS = 4


async def measure(folder: Path, image: Path, *, count: int) -> list[Figure]:
    """Every environment answers its first read; none is ended before all have."""
    async with running(folder, image, slots=count) as (pool, client):
        await client.release(await client.launch())
        before_ms, began_s = pool.cpu_ms(), time.perf_counter()
        ends = await asyncio.gather(
            *(_run(client, f"run-{number}", count // RUNS, began_s) for number in range(RUNS))
        )
        took_s = time.perf_counter() - began_s
        cpu_ms = (pool.cpu_ms() - before_ms) / count
    answered = sum(len(each) for each in ends)
    return [
        Figure(
            key="burst1000_s",
            what=f"burst of {count}, drained",
            value=took_s,
            unit="s",
            goal=40 * count / 1000,
            cpu_ms=cpu_ms,
            count=count,
            note="CPU without machines that live",
        ),
        Figure(key="burst_lost", what="  lost", value=count - answered, goal=0, count=count),
        Figure(
            key="jain",
            what="  Jain index over runs at half time",
            value=jain([sum(end <= took_s / 2 for end in each) for each in ends]),
            goal=0.95,
            is_least=True,
            count=RUNS,
        ),
    ]


async def _run(client: Client, run_id: str, count: int, began_s: float) -> list[float]:
    """Seconds until each environment of a run had answered."""
    leases = await client.launch(count, run_id=run_id)

    async def answer(number: int) -> float:
        (result,) = await client.turn(leases[number], READ)
        if result.is_error:
            raise RuntimeError(result.content.decode())
        return time.perf_counter() - began_s

    return list(await asyncio.gather(*(answer(number) for number in range(count))))


def jain(shares: Sequence[float]) -> float:
    """Jain's fairness index, 1 when all are equal: Jain, Chiu and Hawe, DEC-TR-301, 1984."""
    total = sum(each * each for each in shares)
    return sum(shares) ** 2 / (len(shares) * total) if total else 0.0
