"""Forks and rollbacks of an environment that runs, through the node's own calls."""

import asyncio
import random
import time
from collections.abc import Mapping
from pathlib import Path

from environment_bench.goals import Figure, median
from environment_bench.pool import Client, Pool, running
from etude.v1 import environments_pb2

DIRTY_MIB = 28
FORKS = 16
CHECKPOINTS = 50
NOISE = f"head -c {DIRTY_MIB}M /dev/urandom > /dev/shm/noise; md5sum < /dev/shm/noise | tee sum.txt"
SUM: tuple[str, Mapping[str, object]] = ("read_file", {"path": "sum.txt"})


async def measure(folder: Path, image: Path, *, count: int) -> list[Figure]:
    """Sixteen children of a parent with 28 MiB of its own, then rollbacks over 50 checkpoints."""
    async with running(folder, image, slots=FORKS + 4) as (pool, client):
        forked = await _forks(pool, client)
        rolled = await _rollbacks(pool, client, count)
    return [forked, *rolled]


async def _forks(pool: Pool, client: Client) -> Figure:
    (parent,) = await client.launch()
    told = await _said(client, parent, NOISE)
    before_ms, began_s = pool.cpu_ms(), time.perf_counter()
    await client.snapshot(parent, "fork")
    children = await client.launch(FORKS, snapshot_id="fork")
    answers = await asyncio.gather(*(client.turn(child, SUM) for child in children))
    took_s = time.perf_counter() - began_s
    if any(told.split()[0] not in each.content.decode() for (each,) in answers):
        raise RuntimeError("a child does not know what its parent wrote")
    hashed = await _said(client, children[0], "md5sum < /dev/shm/noise")
    if hashed != told:
        raise RuntimeError(f"a child's memory is {hashed!r}, its parent's {told!r}")
    cpu_ms = (pool.cpu_ms() - before_ms) / FORKS
    await client.release([parent, *children])
    return Figure(
        key="fork16_s",
        what=f"fork x{FORKS}, {DIRTY_MIB} MiB dirty, all answering",
        value=took_s,
        unit="s",
        goal=0.8,
        cpu_ms=cpu_ms,
        count=FORKS,
        note="each reads what its parent wrote; CPU without machines that live",
    )


async def _rollbacks(pool: Pool, client: Client, count: int) -> list[Figure]:
    (lease,) = await client.launch()
    for number in range(CHECKPOINTS):
        await _write(client, lease, number)
        await client.snapshot(lease, f"state-{number}")
    draws, walls, before_ms = random.Random(0), [], pool.cpu_ms()  # noqa: S311 - a fixed order
    for _ in range(count):
        number = draws.randrange(CHECKPOINTS)
        began_s = time.perf_counter()
        await client.rollback(lease, f"state-{number}")
        (result,) = await client.turn(lease, ("read_file", {"path": "state.txt"}))
        walls.append(1000 * (time.perf_counter() - began_s))
        if f"state {number}" not in result.content.decode():
            raise RuntimeError(f"state {number} reads {result.content!r}")
    cpu_ms = (pool.cpu_ms() - before_ms) / count
    await client.release([lease])
    return [
        Figure(
            key="rollback_p50_ms",
            what=f"rollback to one of {CHECKPOINTS} and read, p50",
            value=median(walls),
            unit="ms",
            goal=80,
            cpu_ms=cpu_ms,
            count=count,
        )
    ]


async def _write(client: Client, lease: environments_pb2.Lease, number: int) -> None:
    content = {"path": "state.txt", "content": f"state {number}\n"}
    await client.turn(lease, ("write_file", content))


async def _said(client: Client, lease: environments_pb2.Lease, command: str) -> str:
    (result,) = await client.turn(lease, ("run_terminal", {"command": command}))
    if result.is_error:
        raise RuntimeError(result.content.decode())
    return result.content.decode()
