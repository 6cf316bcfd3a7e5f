"""Ten reads in one turn, as a policy asks for them."""

import time
from pathlib import Path

from environment_bench.goals import Figure, median
from environment_bench.pool import running
from environment_bench.starts import READ

READS = 10


async def measure(folder: Path, image: Path, *, count: int) -> list[Figure]:
    """The median of many turns in one environment, over gRPC.

    Raises:
        RuntimeError: a read failed.
    """
    async with running(folder, image, slots=2) as (pool, client):
        (lease,) = await client.launch()
        await client.turn(lease, *[READ] * READS)
        walls, before_ms = [], pool.cpu_ms()
        for _ in range(count):
            began_s = time.perf_counter()
            results = await client.turn(lease, *[READ] * READS)
            walls.append(1000 * (time.perf_counter() - began_s))
            if any(result.is_error for result in results):
                raise RuntimeError("a read failed")
        cpu_ms = (pool.cpu_ms() - before_ms) / count
        await client.release([lease])
    return [
        Figure(
            key="parallel10_reads_ms",
            what="10 parallel reads of 4 KiB, p50",
            value=median(walls),
            unit="ms",
            goal=3,
            cpu_ms=cpu_ms,
            count=count,
            note="gRPC included; CPU without the guest's",
        )
    ]
