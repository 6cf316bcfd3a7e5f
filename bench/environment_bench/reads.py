"""Ten reads at once, as a policy asks for them: in a machine, and as a turn of its node."""

import asyncio
import time
from pathlib import Path

from environment_bench.goals import Figure, median
from environment_bench.machines import Machines
from environment_bench.pool import running
from environment_bench.starts import READ
from etude.agent.workspace.interface import HOME
from etude.envserver.guest.commands import GuestCommands
from etude.envserver.guest.workspace import GuestWorkspace
from etude.envserver.guest.workspace_files import write_tree
from etude.envserver.storage.trees import File

READS = 10
WARM_UP = 60
"""Rounds before those that count: what a guest does for the first time is translated then."""
NOTES = File(b"0123456789abcdef" * 256)
FILES = {f"notes-{number}.txt": NOTES for number in range(READS)}


async def measure(folder: Path, image: Path, *, count: int) -> list[Figure]:
    """The medians of many.

    Raises:
        RuntimeError: a read failed.
    """
    for each in ("machine", "pool"):
        (folder / each).mkdir()
    return [
        await _in_a_machine(folder / "machine", image, count),
        await _as_a_turn(folder / "pool", image, count),
    ]


async def _in_a_machine(folder: Path, image: Path, count: int) -> Figure:
    machines = await Machines.of(folder, image)
    guest = await machines.handed_out(await machines.paused())
    await write_tree(guest.channel, FILES, root=HOME)
    workspace = GuestWorkspace(guest.channel, GuestCommands(channel=guest.channel).run, cwd=HOME)
    walls: list[float] = []
    before_ms = 0.0
    for number in range(WARM_UP + count):
        if number == WARM_UP:
            before_ms = machines.cpu_ms([guest])
        began_s = time.perf_counter()
        read = await asyncio.gather(*(workspace.read(name) for name in FILES))
        walls.append(1000 * (time.perf_counter() - began_s))
        if any(data != NOTES.content for data in read):
            raise RuntimeError("a read failed")
    cpu_ms = (machines.cpu_ms([guest]) - before_ms) / count
    await guest.destroy()
    await machines.close()
    return Figure(
        key="parallel10_reads_ms",
        what="10 parallel reads of 4 KiB in a machine, p50",
        value=median(walls[WARM_UP:]),
        unit="ms",
        goal=3,
        cpu_ms=cpu_ms,
        count=count,
        note="inside the node; CPU with the guest's",
    )


async def _as_a_turn(folder: Path, image: Path, count: int) -> Figure:
    async with running(folder, image, slots=2) as (pool, client):
        (lease,) = await client.launch()
        for _ in range(WARM_UP):
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
    return Figure(
        key="turn_of_10_reads_ms",
        what="  as a turn of the node, over gRPC, p50",
        value=median(walls),
        unit="ms",
        cpu_ms=cpu_ms,
        count=count,
        note="CPU without the guest's",
    )
