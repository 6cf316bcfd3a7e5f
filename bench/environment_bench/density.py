"""How many environments live at once, what each holds, and whether each is still itself."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from environment_bench.goals import Figure
from environment_bench.pool import Client, running
from etude.v1 import environments_pb2

TOGETHER = 50
"""Environments that are written and read at a time."""
SETTLE_S = 2.0
REST_S = 10.0


class _Seen(NamedTuple):
    """What was found while all rested, and afterwards."""

    machines: int
    """In memory; what sleeps on the disk has none."""
    mib_each: float
    cpu_ms_per_s: float
    right: int
    """Environments that still were themselves."""


async def measure(folder: Path, image: Path, *, count: int) -> list[Figure]:
    """Each writes its own name, all stand still, each reads its own name again."""
    async with running(folder, image, slots=count) as (pool, client):
        await client.release(await client.launch())
        before = available_mib()
        leases = await client.launch(count)
        await _together(leases, lambda lease: _write(client, lease))
        await asyncio.sleep(SETTLE_S)
        machines = pool.machines()
        held = (before - available_mib()) / max(1, len(machines))
        used = await _resting(machines)
        right = await _together(leases, lambda lease: _is_itself(client, lease))
        await client.release(leases)
    return _figures(_Seen(len(machines), held, used, sum(right)), count)


async def _together(
    leases: Sequence[environments_pb2.Lease],
    work: Callable[[environments_pb2.Lease], Awaitable[bool]],
) -> list[bool]:
    """The same with each, some at a time."""
    found: list[bool] = []
    for start in range(0, len(leases), TOGETHER):
        found += await asyncio.gather(*map(work, leases[start : start + TOGETHER]))
    return found


def _figures(seen: _Seen, count: int) -> list[Figure]:
    return [
        Figure(
            key="live_envs",
            what=f"of {count} live, answering with their own state",
            value=seen.right,
            goal=count,
            is_least=True,
            count=count,
        ),
        Figure(
            key="mib_per_env",
            what="  memory of the host for each",
            value=seen.mib_each,
            unit="MiB",
            goal=18,
            count=seen.machines,
            note="those in memory; others sleep on the disk by then",
        ),
        Figure(
            key="live_machines",
            what="  machines in memory at that time",
            value=seen.machines,
            goal=count,
            is_least=True,
            count=count,
        ),
        Figure(
            key="frozen_cpu_ms_per_s",
            what="  CPU of all while they rest",
            value=seen.cpu_ms_per_s,
            unit="ms/s",
            count=count,
            note="some may be on their way to the disk",
        ),
    ]


async def _resting(pids: list[int]) -> float:
    """CPU milliseconds per second of processes that should rest."""
    before_ms = sum(map(used_ms, pids))
    began_s = time.perf_counter()
    await asyncio.sleep(REST_S)
    return (sum(map(used_ms, pids)) - before_ms) / (time.perf_counter() - began_s)


def used_ms(pid: int) -> float:
    """CPU time of all threads of a process: clock_getcpuclockid(3); 0 once it has ended."""
    try:
        return 1000 * time.clock_gettime(~pid << 3 | 2)
    except OSError:
        return 0.0


async def _write(client: Client, lease: environments_pb2.Lease) -> bool:
    content = {"path": "me.txt", "content": f"{lease.lease_id}\n"}
    (result,) = await client.turn(lease, ("write_file", content))
    if result.is_error:
        raise RuntimeError(result.content.decode())
    return True


async def _is_itself(client: Client, lease: environments_pb2.Lease) -> bool:
    (result,) = await client.turn(lease, ("read_file", {"path": "me.txt"}))
    return lease.lease_id in result.content.decode()


def available_mib() -> float:
    """Memory of the host that processes may still take."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    (found,) = (line for line in lines if line.startswith("MemAvailable:"))
    return int(found.split()[1]) / 1024
