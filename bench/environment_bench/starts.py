"""From a request to the first result: a file that is read natively, and a shell command."""

import time
from collections.abc import Mapping
from pathlib import Path

from environment_bench.goals import Figure, median, quantile
from environment_bench.pool import Client, Pool, running
from etude.v1 import environments_pb2

READ: tuple[str, Mapping[str, object]] = ("read_file", {"path": "notes.txt"})
ECHO: tuple[str, Mapping[str, object]] = ("run_terminal", {"command": "echo benchmark"})
WARM_UP = 5


async def measure(folder: Path, image: Path, *, count: int) -> list[Figure]:
    """One environment after the other, each started when the one before has ended."""
    async with running(folder, image, slots=8) as (pool, client):
        for _ in range(WARM_UP):
            await _first(client, READ)
        native, native_cpu_ms = await _series(pool, client, READ, count)
        command, command_cpu_ms = await _series(pool, client, ECHO, max(20, count // 4))
    return [
        Figure(
            key="create_native_p50_ms",
            what="create -> first native result, p50",
            value=median(native),
            unit="ms",
            goal=50,
            cpu_ms=native_cpu_ms,
            count=len(native),
        ),
        Figure(
            key="create_native_p95_ms",
            what="  p95",
            value=quantile(native, 0.95),
            unit="ms",
            goal=75,
            count=len(native),
        ),
        Figure(
            key="create_command_p50_ms",
            what="create -> first command, p50",
            value=median(command),
            unit="ms",
            goal=150,
            cpu_ms=command_cpu_ms,
            count=len(command),
        ),
    ]


async def _series(
    pool: Pool, client: Client, call: tuple[str, Mapping[str, object]], count: int
) -> tuple[list[float], float]:
    """Wall milliseconds of each, and CPU milliseconds of one, its end included."""
    before_ms = pool.cpu_ms()
    walls = [await _first(client, call) for _ in range(count)]
    return walls, (pool.cpu_ms() - before_ms) / count


async def _first(client: Client, call: tuple[str, Mapping[str, object]]) -> float:
    began_s = time.perf_counter()
    (lease,) = await client.launch()
    (result,) = await client.turn(lease, call)
    took_ms = 1000 * (time.perf_counter() - began_s)
    _check(result)
    await client.release([lease])
    return took_ms


def _check(result: environments_pb2.ToolResult) -> None:
    if result.is_error:
        raise RuntimeError(result.content.decode())
