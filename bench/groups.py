"""A group of 16: one set-up and 16 forks against 16 set-ups, and the time to the first tool call.

python bench/groups.py [--only gvisor process qemu] [--siblings 16]

Broker and node run as processes, as in production. The set-up writes 200 files and hashes 32 MiB.
The peer is the same node without forks: each sibling runs the set-up itself. CPU time is that of
broker, node, and whatever lives for the pool. `ahead` is a group whose snapshot was there before
its rollouts were due, as rollout workers take it.

Examples:
  make bench-groups
  python bench/groups.py --only process   a first look, without images
"""

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))  # figures are recorded as tests do

from environment_bench.pool import DEADLINE_S, Client, Pool, used_ms
from tests.support import figures
from tests.support.vm import gvisors, microvms

from etude.v1 import environment_state_pb2, environments_pb2

SETUP = (
    "mkdir -p built && n=0 && while [ $n -lt 200 ]; do"
    " head -c 4096 /dev/urandom > built/$n; n=$((n+1)); done",
    "head -c 33554432 /dev/zero | sha256sum > built/sum",
)
SETUP_LIMIT_S = 300
FIRST_CALL = ("run_terminal", {"command": "cat built/* | sha256sum"})
DRIVERS: Mapping[str, str] = {"process": "", "gvisor": "GVisor", "qemu": "QemuMicroVM"}


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTimes:
    """Seconds of one group, from the launch of its siblings on."""

    all_s: float
    """Until every sibling had its first answer, the shared set-up included."""
    ahead_s: float
    """The same without the shared set-up."""
    first_call_s: float
    """Until a sibling's first answer, without the shared set-up; the median."""
    cpu_s: float
    answers: tuple[str, ...]


def main() -> None:
    """Measure, print, and write bench/out/groups.json."""
    given = _arguments()
    console = Console(width=None if os.isatty(1) else 160)
    found: dict[str, tuple[GroupTimes, GroupTimes]] = {}
    for name in given.only:
        console.log(f"{name}: {given.siblings} siblings …")
        found[name] = asyncio.run(_measure_driver(DRIVERS[name], given.siblings))
    _show(console, found, given.siblings)
    figures.record("groups", **dict(_numbers(found)))


async def _measure_driver(driver: str, siblings: int) -> tuple[GroupTimes, GroupTimes]:
    """One group that is set up sibling by sibling, then one that is forked.

    Raises:
        RuntimeError: forks did not start equal, or set-ups gave equal files.
    """
    with tempfile.TemporaryDirectory(prefix="etude-bench-") as name:
        folder = Path(name)
        image = microvms.small_image().folder if driver else None
        pool = Pool(folder=folder, image=image, slots=siblings + 2, driver=driver)
        try:
            await pool.start()
            async with pool.client() as client:
                await client.release([await _warm(client)])
                separate = await _separate(pool, client, siblings)
                forked = await _forked(pool, client, siblings)
        finally:
            pool.stop()
            await asyncio.to_thread(gvisors.end_all, folder / "scratch")
    if len({*forked.answers}) != 1 or len({*separate.answers}) != siblings:
        raise RuntimeError(f"forks differ, or set-ups are equal: {forked.answers}")
    return separate, forked


async def _warm(client: Client) -> environments_pb2.Lease:
    """Make the node's template and first files, which a pool has before any group."""
    (lease,) = await client.launch()
    await client.turn(lease, ("run_terminal", {"command": "true"}))
    return lease


async def _separate(pool: Pool, client: Client, siblings: int) -> GroupTimes:
    before_s, began_s = _cpu_s(pool), time.perf_counter()
    leases = await client.launch(siblings)

    async def start(lease: environments_pb2.Lease) -> tuple[str, float]:
        await _set_up(client, lease)
        return await _first_call(client, lease, began_s)

    answers = await asyncio.gather(*(start(lease) for lease in leases))
    all_s, cpu_s = time.perf_counter() - began_s, _cpu_s(pool) - before_s
    await client.release(leases)
    return _times(answers, all_s=all_s, ahead_s=all_s, cpu_s=cpu_s)


async def _forked(pool: Pool, client: Client, siblings: int) -> GroupTimes:
    before_s, began_s = _cpu_s(pool), time.perf_counter()
    (first,) = await client.launch()
    await _set_up(client, first)
    request = environment_state_pb2.SnapshotRequest(
        lease_id=first.lease_id, control_token=first.control_token, snapshot_id="group"
    )
    await client.states.Snapshot(request, timeout=DEADLINE_S)
    due_s = time.perf_counter()
    leases = await client.launch(siblings, snapshot_id="group")
    answers = await asyncio.gather(*(_first_call(client, lease, due_s) for lease in leases))
    ended_s, cpu_s = time.perf_counter(), _cpu_s(pool) - before_s
    await client.release([first, *leases])
    return _times(answers, all_s=ended_s - began_s, ahead_s=ended_s - due_s, cpu_s=cpu_s)


async def _set_up(client: Client, lease: environments_pb2.Lease) -> None:
    request = environment_state_pb2.SetUpRequest(
        lease_id=lease.lease_id,
        control_token=lease.control_token,
        commands=SETUP,
        timeout_seconds=SETUP_LIMIT_S,
    )
    done = await client.states.SetUp(request, timeout=DEADLINE_S)
    if done.succeeded != len(SETUP):
        raise RuntimeError(f"set-up: {done}")


async def _first_call(
    client: Client, lease: environments_pb2.Lease, began_s: float
) -> tuple[str, float]:
    (result,) = await client.turn(lease, FIRST_CALL)
    if result.is_error:
        raise RuntimeError(result.content.decode())
    return result.content.decode().split()[0], time.perf_counter() - began_s


def _times(
    answers: Sequence[tuple[str, float]], *, all_s: float, ahead_s: float, cpu_s: float
) -> GroupTimes:
    return GroupTimes(
        all_s=all_s,
        ahead_s=ahead_s,
        first_call_s=statistics.median(took_s for _, took_s in answers),
        cpu_s=cpu_s,
        answers=tuple(answer for answer, _ in answers),
    )


def _cpu_s(pool: Pool) -> float:
    """CPU time of the pool's processes and of their descendants that live or were waited for."""
    children: dict[int, list[int]] = {}
    roots = {process.pid for process in (pool.broker, pool.node) if process is not None}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if str(pool.folder) in (entry / "cmdline").read_text(errors="replace"):
                roots.add(int(entry.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
        children.setdefault(parent, []).append(int(entry.name))
    pending, seen = list(roots), set[int]()
    total_ms = 0.0
    while pending:
        pid = pending.pop()
        if pid not in seen and Path(f"/proc/{pid}/stat").exists():
            seen.add(pid)
            total_ms += used_ms(pid)
            pending += children.get(pid, [])
    return total_ms / 1000


def _numbers(
    found: Mapping[str, tuple[GroupTimes, GroupTimes]],
) -> Iterator[tuple[str, float]]:
    for name, (separate, forked) in found.items():
        for kind, times in (("separate", separate), ("forked", forked)):
            yield f"{name}_{kind}_s", round(times.all_s, 3)
            yield f"{name}_{kind}_cpu_s", round(times.cpu_s, 2)
            yield f"{name}_{kind}_first_call_s", round(times.first_call_s, 3)
        yield f"{name}_ratio", round(separate.all_s / forked.all_s, 2)
        yield f"{name}_cpu_ratio", round(separate.cpu_s / forked.cpu_s, 2)
        first = separate.first_call_s / forked.first_call_s
        yield f"{name}_first_call_ratio", round(first, 2)


def _show(
    console: Console, found: Mapping[str, tuple[GroupTimes, GroupTimes]], siblings: int
) -> None:
    load = os.getloadavg()[0]
    table = Table(title=f"a group of {siblings}, {os.cpu_count()} cores, load {load:.1f}")
    columns = ("driver", "", "all answer s", "ahead s", "first call p50 s", "CPU-s")
    for column in (*columns, "separate/forked", "CPU", "first call"):
        table.add_column(column)
    for name, (separate, forked) in found.items():
        for kind, times in (("set up each", separate), ("forked", forked)):
            seconds = (times.all_s, times.ahead_s, times.first_call_s, times.cpu_s)
            ratios = (
                separate.all_s / times.all_s,
                separate.cpu_s / times.cpu_s,
                separate.first_call_s / times.first_call_s,
            )
            table.add_row(
                name, kind, *(f"{n:.2f}" for n in seconds), *(f"{n:.2f} x" for n in ratios)
            )
    console.print(table)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench/groups.py", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=DRIVERS, default=list(DRIVERS))
    parser.add_argument("--siblings", type=int, default=16)
    return parser.parse_args()


if __name__ == "__main__":
    main()
