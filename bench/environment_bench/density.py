"""How many environments live at once, what each holds, and whether each is still itself."""

import asyncio
import time
from pathlib import Path

from environment_bench.goals import Figure
from environment_bench.pool import Client, running
from etude.v1 import environments_pb2

TOGETHER = 50
"""Environments that are written and read at a time."""
SETTLE_S = 2.0
REST_S = 10.0


async def measure(folder: Path, image: Path, *, count: int) -> list[Figure]:
    """Each writes its own name, all stand still, each reads its own name again."""
    async with running(folder, image, slots=count) as (pool, client):
        await client.release(await client.launch())
        before = available_mib()
        leases = await client.launch(count)
        for start in range(0, count, TOGETHER):
            group = leases[start : start + TOGETHER]
            await asyncio.gather(*(_write(client, lease) for lease in group))
        await asyncio.sleep(SETTLE_S)
        machines = pool.machines()
        held = (before - available_mib()) / max(1, len(machines))
        used_ms = await _resting(machines)
        right = 0
        for start in range(0, count, TOGETHER):
            group = leases[start : start + TOGETHER]
            right += sum(await asyncio.gather(*(_is_itself(client, lease) for lease in group)))
        await client.release(leases)
    return [
        Figure(
            key="live_envs",
            what=f"of {count} live, answering with their own state",
            value=right,
            goal=count,
            is_least=True,
            count=count,
        ),
        Figure(
            key="mib_per_env",
            what="  memory of the host for each",
            value=held,
            unit="MiB",
            goal=18,
            count=len(machines),
            note="those in memory; others sleep on the disk by then",
        ),
        Figure(
            key="live_machines",
            what="  machines in memory at that time",
            value=len(machines),
            goal=count,
            is_least=True,
            count=count,
        ),
        Figure(
            key="frozen_cpu_ms_per_s",
            what="  CPU of all while they rest",
            value=used_ms,
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


async def _write(client: Client, lease: environments_pb2.Lease) -> None:
    content = {"path": "me.txt", "content": f"{lease.lease_id}\n"}
    (result,) = await client.turn(lease, ("write_file", content))
    if result.is_error:
        raise RuntimeError(result.content.decode())


async def _is_itself(client: Client, lease: environments_pb2.Lease) -> bool:
    (result,) = await client.turn(lease, ("read_file", {"path": "me.txt"}))
    return lease.lease_id in result.content.decode()


def available_mib() -> float:
    """Memory of the host that processes may still take."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    (found,) = (line for line in lines if line.startswith("MemAvailable:"))
    return int(found.split()[1]) / 1024
