"""A floor of a pool that is lent to rollouts: does serving wait longer for it, is anything lost?

python bench/lending.py [--seconds 60] [--seed 7]

Broker and host run as processes (driver Process), with 20 slots. People ask for sandboxes in
bursts: most of the time at most 5 at once, and at last, in the rush for which the floor is made,
10. Rollouts fill what they may, by the trainer's own client, and write one line a turn. Three
times the same people:
  reserved   the peer: 10 slots are kept for people, rollouts have the other 10
  lent       a floor of 10 for people; rollouts have all 20, and are paused for people
  unlent     no floor: rollouts have all 20, and people wait until one ends
A sandbox's latency is the time from its launch to the answer of its first call. A broker that has
just started has seen no people, so those of the first seconds are not counted.

Examples:
  make bench-lending
  python bench/lending.py --seconds 30   a first look
"""

import argparse
import asyncio
import itertools
import json
import math
import os
import random
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))  # figures are recorded as tests do

from environment_bench.pool import Client, Pool
from tests.support import figures
from typing_extensions import override

from etude.agent.tool_calls import ToolCall
from etude.common.errors import EtudeError
from etude.trainer.rollouts.leases import Leases
from etude.trainer.rollouts.outage import OutageBudget
from etude.trainer.rollouts.sandbox_client import SandboxClient
from etude.v1 import environments_pb2

SLOTS, FLOOR = 20, 10
USUAL = 5
"""Most people at once before the rush."""
TURNS = 10
THINK_S = 1.0
"""Time of a completion between two turns of a rollout."""
USE_S = 1.5
"""Time for which a person uses a sandbox."""
LEAVE_S = 1.0
"""Time in which a sandbox has started, and has ended: the next person may come then."""
CALM_S, BURST_S = 1.5, 4.0
"""Mean time between two lone people, and between two bursts."""
WARM_UP_S = 10.0
RUSH_SHARE = 0.35
"""Of the time, at its end."""
OUTAGE_S = 300.0
SAMPLE_S = 0.1


class Mode(NamedTuple):
    """How people and rollouts share the pool."""

    name: str
    rollouts: int
    """Rollouts at once."""
    floor: int
    share: float = 1.0
    """Of the time of the other modes."""


MODES = (
    Mode("reserved", SLOTS - FLOOR, 0),
    Mode("lent", SLOTS, FLOOR),
    Mode("unlent", SLOTS, 0, 0.5),
)


class Arrival(NamedTuple):
    """One person who asks for a sandbox."""

    at_s: float
    is_rush: bool


@dataclass(slots=True, kw_only=True)
class SharedPool(Pool):
    """Its people may have a floor."""

    floor: int = 0

    @override
    def spec(self) -> dict[str, object]:
        classes = [{"name": "Serving", "floorSlots": self.floor}] if self.floor else []
        return {**Pool.spec(self), "lease": {"classes": classes}}


@dataclass(slots=True, kw_only=True)
class Load:
    """People and rollouts of one mode, and their figures."""

    leases: Leases
    client: Client
    seconds: float
    usual_s: list[float] = field(default_factory=list)
    """Latencies before the rush."""
    rush_s: list[float] = field(default_factory=list)
    """Latencies in the rush."""
    turns: int = 0
    lost_rollouts: int = 0
    lost_people: int = 0
    rollouts: int = 0
    """Environments that rollouts hold now."""
    lent_s: float = 0.0
    preempted_s: float = 0.0
    cpu_s: float = 0.0
    _keys: Iterator[int] = field(default_factory=itertools.count)

    @property
    def latency_s(self) -> list[float]:
        """Latencies of all people that count."""
        return self.usual_s + self.rush_s

    async def run(self, mode: Mode, pool: SharedPool, seed: int) -> None:
        """Rollouts all the time, and people as they come."""
        until_s = time.monotonic() + self.seconds
        async with asyncio.TaskGroup() as tasks:
            for _ in range(mode.rollouts):
                tasks.create_task(self._keep_rolling(until_s))
            await asyncio.sleep(2 * THINK_S)  # rollouts have their slots
            tasks.create_task(self._sample(pool, mode, until_s))
            for arrival in arrivals(seed, self.seconds - 2 * THINK_S - USE_S):
                tasks.create_task(self._person(arrival))

    async def _keep_rolling(self, until_s: float) -> None:
        while time.monotonic() < until_s:
            try:
                await self._rollout(until_s)
            except EtudeError as error:
                self.lost_rollouts += 1
                Console(stderr=True).log(f"a rollout is lost: {error}")

    async def _rollout(self, until_s: float) -> None:
        """One rollout, which has to find each line that it wrote, once and in order.

        Raises:
            EtudeError: it is lost.
        """
        environment = await self._lease(environments_pb2.LEASE_CLASS_TRAINING)
        self.rollouts += 1
        try:
            await self._roll(environment, until_s)
        finally:
            self.rollouts -= 1
            self.leases.release([environment.lease.lease_id])

    async def _roll(self, environment: SandboxClient, until_s: float) -> None:
        written = []
        for turn in range(TURNS):
            await environment.run([_command(turn, f"echo {turn} >> log")])
            written.append(str(turn))
            self.turns += 1
            if time.monotonic() > until_s:
                break
            await asyncio.sleep(THINK_S)
        changes = environments_pb2.WorkspaceDiff.FromString(await environment.diff())
        found = [file.content.decode().split() for file in changes.written if file.path == "log"]
        self.lost_rollouts += found != [written]

    async def _person(self, arrival: Arrival) -> None:
        await asyncio.sleep(arrival.at_s)
        asked_s = time.monotonic()
        try:
            environment = await self._lease(environments_pb2.LEASE_CLASS_SERVING)
            await environment.run([_command(0, "echo hello")])
        except EtudeError as error:
            self.lost_people += 1
            Console(stderr=True).log(f"a sandbox is lost: {error}")
            return
        if arrival.at_s >= WARM_UP_S:
            counted = self.rush_s if arrival.is_rush else self.usual_s
            counted.append(time.monotonic() - asked_s)
        await asyncio.sleep(USE_S)
        self.leases.release([environment.lease.lease_id])

    async def _lease(self, lease_class: environments_pb2.LeaseClass) -> SandboxClient:
        request = environments_pb2.LaunchBatchRequest(
            run_id="bench",
            idempotency_key=f"key-{next(self._keys)}",
            template="t",
            workspace=environments_pb2.WorkspaceSource(uri=self.client.uri),
            count=1,
            toolset="Standard",
            ttl_seconds=120,
            queue_timeout_seconds=300,
            lease_class=lease_class,
        )
        async for result in self.leases.launch(request):
            if result.lease is None:
                raise EtudeError(result.failure)
            return SandboxClient(
                self.client.node, result.lease, self.leases, OutageBudget(OUTAGE_S), OUTAGE_S
            )
        raise EtudeError("a launch without an outcome")

    async def _sample(self, pool: SharedPool, mode: Mode, until_s: float) -> None:
        """Integrate the slots of the floor that rollouts run in."""
        last_s = time.monotonic()
        while last_s < until_s:
            await asyncio.sleep(SAMPLE_S)
            num_paused = await asyncio.to_thread(_num_preempted, pool.ports["probe-broker"])
            now_s = time.monotonic()
            running = self.rollouts - num_paused
            self.lent_s += max(0.0, running - (SLOTS - FLOOR)) * (now_s - last_s)
            self.preempted_s += num_paused * (now_s - last_s)
            last_s = now_s


def arrivals(seed: int, seconds: float) -> list[Arrival]:
    """People as they come: alone, and in bursts; no more at once than the floor has."""
    source = random.Random(seed)  # noqa: S311 - nothing secret depends on it
    rush_s = (1 - RUSH_SHARE) * seconds
    wishes, at_s = [], 0.0
    while (at_s := at_s + source.expovariate(1 / CALM_S)) < seconds:
        wishes.append(at_s)
    at_s = 1.0
    while at_s < seconds:
        most = USUAL if at_s < rush_s else FLOOR
        size = source.randint(most // 2, most)
        wishes += [at_s + source.uniform(0, 0.2) for _ in range(size)]
        at_s += BURST_S * source.uniform(0.7, 1.3)
    found: list[Arrival] = []
    for wish_s in sorted(wishes):
        is_rush = wish_s >= rush_s
        present = sum(wish_s - each.at_s < USE_S + LEAVE_S for each in found)
        if present < (FLOOR if is_rush else USUAL):
            found.append(Arrival(wish_s, is_rush))
    return found


def _command(number: int, command: str) -> ToolCall:
    return ToolCall(f"call-{number}", "run_terminal", json.dumps({"command": command}))


def _num_preempted(port: int) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    (found,) = [line for line in lines if line.startswith("etude_env_preempted_leases ")]
    return float(found.split()[1])


def quantile(values: Sequence[float], share: float) -> float:
    """Nearest rank."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


async def measure(mode: Mode, seconds: float, seed: int) -> Load:
    """One mode in a pool of its own."""
    with tempfile.TemporaryDirectory(prefix="etude-bench-") as name:
        pool = SharedPool(folder=Path(name), image=None, slots=SLOTS, floor=mode.floor)
        try:
            await pool.start()
            async with pool.client() as client:
                load = Load(leases=Leases(client.broker, OUTAGE_S), client=client, seconds=seconds)
                renewing = asyncio.create_task(load.leases.keep_alive(), name="renew")
                await client.release(await client.launch())  # the template is there
                before_ms = pool.cpu_ms()
                await load.run(mode, pool, seed)
                load.cpu_s = (pool.cpu_ms() - before_ms) / 1000
                renewing.cancel()
                await asyncio.gather(renewing, return_exceptions=True)
        finally:
            pool.stop()
    return load


def main() -> None:
    """Measure, print, and write bench/out/lending.json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=80.0, help="of each mode")
    parser.add_argument("--seed", type=int, default=7, help="of the people")
    given = parser.parse_args()
    console = Console(width=None if os.isatty(1) else 140)
    found: dict[str, Load] = {}
    for mode in MODES:
        seconds = given.seconds * mode.share
        console.log(f"{mode.name}: {seconds:.0f} s …")
        found[mode.name] = asyncio.run(measure(mode, seconds, given.seed))
    _show(console, found)
    _record(found["reserved"], found["lent"], found["unlent"])


def _record(reserved: Load, lent: Load, unlent: Load) -> None:
    p99_s = quantile(reserved.latency_s, 0.99)
    usual_s, rush_s = quantile(reserved.usual_s, 0.99), quantile(reserved.rush_s, 0.99)
    figures.record(
        "lending",
        p99_ratio=round(quantile(lent.latency_s, 0.99) / p99_s, 2),
        p99_ratio_usual=round(quantile(lent.usual_s, 0.99) / usual_s, 2),
        p99_ratio_rush=round(quantile(lent.rush_s, 0.99) / rush_s, 2),
        p99_ratio_without_floor=round(quantile(unlent.latency_s, 0.99) / p99_s, 2),
        p99_reserved_ms=round(1000 * p99_s),
        p99_lent_ms=round(1000 * quantile(lent.latency_s, 0.99)),
        p50_reserved_ms=round(1000 * quantile(reserved.latency_s, 0.5)),
        p50_lent_ms=round(1000 * quantile(lent.latency_s, 0.5)),
        people=len(lent.latency_s),
        lent_environment_s=round(lent.lent_s, 1),
        preempted_environment_s=round(lent.preempted_s, 1),
        turns_ratio=round(lent.turns / reserved.turns, 2),
        lost=sum(each.lost_rollouts + each.lost_people for each in (reserved, lent)),
        cpu_s=round(lent.cpu_s, 1),
        cpu_reserved_s=round(reserved.cpu_s, 1),
    )


def _show(console: Console, found: dict[str, Load]) -> None:
    table = Table("", "people", "p50 ms", "usual p99 ms", "rush p99 ms")
    for name in ("rollout turns", "lent s", "paused s", "lost", "CPU s"):
        table.add_column(name)
    for name, load in found.items():
        table.add_row(
            name,
            str(len(load.latency_s)),
            f"{1000 * quantile(load.latency_s, 0.5):.0f}",
            f"{1000 * quantile(load.usual_s, 0.99):.0f}",
            f"{1000 * quantile(load.rush_s, 0.99):.0f}",
            str(load.turns),
            f"{load.lent_s:.0f}",
            f"{load.preempted_s:.0f}",
            str(load.lost_rollouts + load.lost_people),
            f"{load.cpu_s:.1f}",
        )
    console.print(table)


if __name__ == "__main__":
    main()
