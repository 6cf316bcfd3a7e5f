"""Paused clones: from a request to an answer of the guest, and what a live snapshot stops."""

import time
from pathlib import Path

from environment_bench.goals import Figure, median, quantile
from environment_bench.machines import Machines
from etude.envserver.drivers.vm.dirty_pages import PageBuffer
from etude.envserver.drivers.vm.disk import PARTIAL
from etude.envserver.guest.commands import GuestCommands

PAUSED = 64
SNAPSHOTS = 20
DIRTY_MIB = (0, 4, 16, 28, 64)


async def measure(folder: Path, image: Path, *, count: int) -> list[Figure]:
    """Hand-outs in rounds of 64 that were made before, then snapshots with more and more memory."""
    machines = await Machines.of(folder, image)
    try:
        return [*await _handouts(machines, count), *await _pauses(machines)]
    finally:
        await machines.close()


async def _handouts(machines: Machines, count: int) -> list[Figure]:
    walls: list[float] = []
    used_ms = 0.0
    while len(walls) < count:
        waiting = [await machines.paused() for _ in range(min(PAUSED, count - len(walls)))]
        for each in waiting:
            before_ms, began_s = machines.cpu_ms([each]), time.perf_counter()
            await machines.handed_out(each)
            walls.append(1000 * (time.perf_counter() - began_s))
            used_ms += machines.cpu_ms([each]) - before_ms
            await each.destroy()
    return [
        Figure(
            key="handout_p50_ms",
            what="hand-out of a paused clone, p50",
            value=median(walls),
            unit="ms",
            goal=2,
            cpu_ms=used_ms / len(walls),
            count=len(walls),
        ),
        Figure(
            key="handout_p99_ms",
            what="  p99",
            value=quantile(walls, 0.99),
            unit="ms",
            goal=10,
            count=len(walls),
        ),
    ]


async def _pauses(machines: Machines) -> list[Figure]:
    guest = await machines.handed_out(await machines.paused())
    buffer = PageBuffer((DIRTY_MIB[-1] + 32) << 20)
    points: list[tuple[float, float]] = []
    for mib in DIRTY_MIB:
        if mib:
            line = f"head -c {mib}M /dev/urandom > /dev/shm/noise"
            await GuestCommands(channel=guest.channel, uid=0).run(line, 300)
        for _ in range(SNAPSHOTS):
            saved = await machines.template.save(
                guest.vm, buffer, keep_running=True, disk=guest.vm.folder / PARTIAL
            )
            points.append((saved.changed_bytes / (1 << 20), 1000 * saved.pause_s))
            saved.close()
    await guest.destroy()
    base, slope = fitted(points)
    return [
        Figure(
            key="snapshot_pause_base_ms",
            what="live snapshot: pause",
            value=base,
            unit="ms",
            goal=6,
            count=len(points),
            note="least squares",
        ),
        Figure(
            key="snapshot_pause_per_mib_ms",
            what="  and for each MiB that was written",
            value=slope,
            unit="ms",
            goal=0.5,
            count=len(points),
        ),
    ]


def fitted(points: list[tuple[float, float]]) -> tuple[float, float]:
    """The line of least squares: its height at 0, and its slope."""
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum(
        (x - mean_x) ** 2 for x, _ in points
    )
    return mean_y - slope * mean_x, slope
