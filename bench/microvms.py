"""What microVMs cost: boot, clone, live delta, a frozen clone; wall time beside CPU time.

python bench/microvms.py [--spec SPEC] [--clones N]

On a busy machine wall time tells of the neighbours; CPU time is the figure to watch.
"""

import argparse
import asyncio
import json
import os
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from environment_bench.needs import agent_here
from rich.console import Console
from rich.table import Table

from etude.common.run_folder.state import images_folder
from etude.envserver.drivers.vm import guest_vm, host_cpu
from etude.envserver.drivers.vm.dirty_pages import PageBuffer
from etude.envserver.drivers.vm.disk import PARTIAL
from etude.envserver.drivers.vm.jail import Jail
from etude.envserver.drivers.vm.prewarm import prewarm_template
from etude.envserver.drivers.vm.qemu import boot, delta, template
from etude.envserver.drivers.vm.qemu.command_line import QemuConfig
from etude.envserver.drivers.vm.qemu.template import QemuTemplate
from etude.envserver.drivers.vm.qemu.vm import QemuVm
from etude.envserver.guest.channel import GuestChannel, GuestIdentity
from etude.envserver.guest.commands import GuestCommands
from etude.envserver.guest.workspace import GuestWorkspace
from etude.envserver.images.build_cache import BuildCache
from etude.envserver.images.builder import build
from etude.envserver.images.spec import BusyboxBase, ImageBase, ImageSpec, read_spec

OUT = Path(__file__).parent / "out" / "microvms.json"
LIMIT_S = 180.0
REPEATS = 10
FROZEN = 20


class Cost(NamedTuple):
    """What one operation took."""

    wall_ms: float
    cpu_ms: float
    """Of the monitor and of this process."""


@dataclass(slots=True)
class Clock:
    """Wall time, and CPU time of this process and of monitors."""

    pids: list[int] = field(default_factory=list)
    _wall_s: float = 0.0
    _cpu_s: float = 0.0

    def start(self) -> None:
        """Begin to measure."""
        self._wall_s, self._cpu_s = time.perf_counter(), self._used_s()

    def stop(self, *started: int) -> Cost:
        """What it took, with all that was used by processes that were started meanwhile."""
        wall_s = time.perf_counter() - self._wall_s
        used_s = self._used_s() - self._cpu_s + sum(cpu_s(pid) for pid in started)
        return Cost(1000 * wall_s, 1000 * used_s)

    def _used_s(self) -> float:
        return time.process_time() + sum(cpu_s(pid) for pid in self.pids)


def cpu_s(pid: int) -> float:
    """CPU time of all threads of a process, from its clock: clock_getcpuclockid(3)."""
    return time.clock_gettime(~pid << 3 | 2)


class Guest(NamedTuple):
    """A running clone."""

    vm: QemuVm
    channel: GuestChannel


@dataclass(slots=True)
class Bench:
    """One template, its clones, and what was measured."""

    folder: Path
    template: QemuTemplate
    buffer: PageBuffer = field(default_factory=lambda: PageBuffer(64 << 20))
    rows: list[tuple[str, str]] = field(default_factory=list)

    async def paused(self) -> QemuVm:
        """A restored clone that has not run."""
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        shell = await template.spawn_shell(self.template, folder=folder, jail=Jail())
        await template.restore_template(shell, self.template)
        return shell

    async def guest(self) -> Guest:
        """A clone that answers."""
        return await awake(await self.paused())

    async def clones(self, count: int) -> None:
        """From nothing to a clone that answers a ping."""
        costs = []
        for _ in range(count):
            clock = Clock()
            clock.start()
            guest = await self.guest()
            await answers(guest)
            costs.append(clock.stop(guest.vm.pid))
            await end(guest)
        self.add(f"clone: spawn, restore, sync, ping (p50 of {count})", costs)

    async def first_results(self, count: int) -> None:
        """From nothing to a file that was read, and to a command that has run."""
        for what, ask in (("file", _read), ("command", _command)):
            costs = []
            for _ in range(count):
                clock = Clock()
                clock.start()
                guest = await self.guest()
                await ask(guest)
                costs.append(clock.stop(guest.vm.pid))
                await end(guest)
            self.add(f"clone: to the first {what} (p50 of {count})", costs)

    async def levels(self, count: int) -> None:
        """What is left to do for a start when the rest was done ahead."""
        shells, paused = [], []
        for _ in range(count):
            folder = Path(tempfile.mkdtemp(dir=self.folder))
            shell = await template.spawn_shell(self.template, folder=folder, jail=Jail())
            clock = Clock([shell.pid])
            clock.start()
            found = await guest_vm.start_clone(shell, self.template, name="bench")
            shells.append(clock.stop())
            await found.destroy()
            folder = Path(tempfile.mkdtemp(dir=self.folder))
            shell = await template.spawn_shell(self.template, folder=folder, jail=Jail())
            waiting = await guest_vm.start_paused_clone(shell, self.template)
            clock = Clock([shell.pid])
            clock.start()
            found = await guest_vm.resume_paused_clone(waiting, name="bench")
            paused.append(clock.stop())
            await found.destroy()
        self.add(f"start from a shell (p50 of {count})", shells)
        self.add(f"start from a paused clone (p50 of {count})", paused)

    async def pauses(self, mib: int) -> None:
        """A live delta with so much written by the guest before."""
        guest = await self.guest()
        if mib:
            line = f"dd if=/dev/urandom of=/tmp/noise bs=1M count={mib} 2>/dev/null"
            await GuestCommands(channel=guest.channel, uid=0).run(line, LIMIT_S)
        walls, sizes, costs = [], [], []
        for _ in range(REPEATS):
            clock = Clock([guest.vm.pid])
            clock.start()
            saved = await delta.save_delta(
                guest.vm,
                self.template,
                self.buffer,
                keep_running=True,
                disk=guest.vm.folder / PARTIAL,
            )
            costs.append(clock.stop())
            walls.append(1000 * saved.pause_s)
            sizes.append(saved.changed_bytes / (1 << 20))
            saved.close()
        await end(guest)
        pause = f"{statistics.median(walls):.1f} ms wall, {min(walls):.1f} at best"
        self.rows.append((f"delta: pause at {statistics.median(sizes):.1f} MiB", pause))
        self.add(f"delta: whole of it at {statistics.median(sizes):.1f} MiB", costs)

    async def frozen(self) -> None:
        """What clones hold that have answered once and stand still."""
        before = available_mib()
        guests = [await self.guest() for _ in range(FROZEN)]
        for guest in guests:
            await answers(guest)
            await guest.vm.freeze()
        await asyncio.sleep(0.2)
        ticks = [cpu_s(guest.vm.pid) for guest in guests]
        held = [memory_mib(guest.vm.pid) for guest in guests]
        await asyncio.sleep(2)
        used = sum(cpu_s(guest.vm.pid) - was for guest, was in zip(guests, ticks, strict=True))
        private = statistics.median(each["Anonymous"] for each in held)
        rss, pss = (statistics.median(each[name] for each in held) for name in ("Rss", "Pss"))
        text = f"{private:.1f} MiB of its own, {pss:.1f} PSS, {rss:.1f} RSS"
        self.rows.append((f"frozen clone (median of {FROZEN})", text))
        free = (before - available_mib()) / FROZEN
        self.rows.append(("  of the machine's available memory", f"{free:.1f} MiB each"))
        self.rows.append(("  CPU time of all in 2 s", f"{1000 * used:.2f} ms"))
        for guest in guests:
            await end(guest)

    def add(self, what: str, costs: Sequence[Cost]) -> None:
        """A row with medians."""
        wall = statistics.median(cost.wall_ms for cost in costs)
        cpu = statistics.median(cost.cpu_ms for cost in costs)
        self.rows.append((what, f"{wall:.1f} ms wall, {cpu:.1f} ms CPU"))


async def awake(vm: QemuVm) -> Guest:
    """Let a restored clone run and become itself."""
    await vm.thaw()
    reader, writer = await asyncio.open_unix_connection(sock=await vm.agent())
    channel = GuestChannel(reader, writer)
    await channel.reset()
    name = secrets.token_hex(4)
    await channel.sync(
        GuestIdentity(env_id=name, token=secrets.token_bytes(16), generation=1, hostname=name)
    )
    return Guest(vm, channel)


async def _read(guest: Guest) -> None:
    commands = GuestCommands(channel=guest.channel)
    await GuestWorkspace(guest.channel, commands.run, cwd="/etc").read("passwd")


async def _command(guest: Guest) -> None:
    await GuestCommands(channel=guest.channel).run("echo benchmark", LIMIT_S)


async def answers(guest: Guest) -> None:
    """Wait for a clone's answer.

    Raises:
        RuntimeError: there is none.
    """
    if not await guest.channel.ping(timeout_s=LIMIT_S):
        raise RuntimeError("a clone does not answer")


async def end(guest: Guest) -> None:
    """Kill a clone."""
    await guest.channel.close()
    await guest.vm.destroy()


def memory_mib(pid: int) -> dict[str, float]:
    """Sums over all mappings of a process."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()[1:]
    return {line.split(":")[0]: int(line.split()[1]) / 1024 for line in lines}


def available_mib() -> float:
    """What the kernel could still give."""
    text = Path("/proc/meminfo").read_text(encoding="ascii")
    (line,) = (each for each in text.splitlines() if each.startswith("MemAvailable"))
    return int(line.split()[1]) / 1024


async def booted(spec: ImageSpec, agent: Path, folder: Path, say: Callable[[str], None]) -> Bench:
    """Boot once and seal."""
    image = build(spec, agent=agent, cache=BuildCache(images_folder()), say=say)
    machine = QemuConfig(tsc_khz=host_cpu.host_tsc_khz())
    clock = Clock()
    clock.start()
    booting = await boot.boot(
        image, machine, folder=Path(tempfile.mkdtemp(dir=folder)), jail=Jail()
    )
    reader, writer = await asyncio.open_unix_connection(sock=await booting.vm.agent())
    channel = GuestChannel(reader, writer)
    await channel.hello(timeout_s=LIMIT_S)
    booted_ms = clock.stop(booting.vm.pid)
    await channel.reset()
    await channel.sync(
        GuestIdentity(env_id="template", token=secrets.token_bytes(16), generation=0)
    )
    await prewarm_template(channel)
    await channel.sync(GuestIdentity(env_id="", token=b"", generation=0))
    await channel.close()
    clock.start()
    sealed = await boot.seal(booting)
    seal = clock.stop()
    made = Bench(folder, sealed)
    made.add("cold boot to the agent's first word", [booted_ms])
    made.add("seal the template", [seal])
    return made


async def measured(spec: ImageSpec, agent: Path, clones: int) -> Bench:
    """Every figure."""
    with tempfile.TemporaryDirectory(prefix="etude-bench-") as name:
        bench = await booted(spec, agent, Path(name), lambda text: print(text, file=sys.stderr))
        await bench.clones(clones)
        await bench.clones(clones)
        await bench.first_results(clones)
        await bench.levels(clones)
        await bench.pauses(0)
        await bench.pauses(16)
        await bench.frozen()
        bench.template.close()
    return bench


def main() -> int:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--spec", type=Path, help="image to boot; a small one unless given")
    parser.add_argument("--clones", type=int, default=30)
    given = parser.parse_args()
    agent = agent_here("microVMs")
    if agent is None:
        return 0
    small = ImageSpec(name="small", base=ImageBase(busybox=BusyboxBase()))
    spec = read_spec(given.spec) if given.spec else small
    bench = asyncio.run(measured(spec, agent, given.clones))
    load = os.getloadavg()[0]
    table = Table("", f"image {spec.name}, load {load:.1f}", box=None)
    for row in bench.rows:
        table.add_row(*row)
    Console().print(table)
    OUT.parent.mkdir(exist_ok=True)
    kept = {"image": spec.name, "load": load, "rows": bench.rows}
    OUT.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
