"""Where the CPU-ms of a start go: one machine started alone beside one that is split off.

python bench/start_stages.py [--count N]

Of the driver alone, without broker, node and gRPC. CPU time is of the monitors and of this process.
"""

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from environment_bench.machines import Machines
from environment_bench.needs import agent_here
from rich.console import Console
from rich.table import Table

from etude.agent.workspace.interface import HOME
from etude.common.run_folder.state import images_folder
from etude.demo import image as demo_image
from etude.envserver.drivers.vm import guest_vm
from etude.envserver.drivers.vm.guest_vm import GuestVm
from etude.envserver.drivers.vm.jail import Jail
from etude.envserver.drivers.vm.qemu import template
from etude.envserver.drivers.vm.qemu.fork_server import fork_server, preload_library
from etude.envserver.drivers.vm.qemu.fork_server.fork_server import ForkServer
from etude.envserver.drivers.vm.qemu.vm import QemuVm
from etude.envserver.drivers.vm.start.starter import cpu_s
from etude.envserver.guest.commands import GuestCommands
from etude.envserver.guest.workspace import GuestWorkspace
from etude.envserver.guest.workspace_files import write_tree
from etude.envserver.images.build_cache import BuildCache
from etude.envserver.images.builder import build
from etude.envserver.storage.trees import File

TREE = {"notes.txt": File(b"0123456789abcdef" * 256), "run.sh": File(b"echo ran\n")}
COMMANDS = ("echo benchmark", "echo benchmark", "python3 -c pass")
LIMIT_S = 120.0
_T = TypeVar("_T")


@dataclass(slots=True)
class Clock:
    """CPU-ms of each stage of one kind of start, as often as it was done."""

    pids: list[int] = field(default_factory=list)
    stages: dict[str, list[float]] = field(default_factory=dict)

    async def of(self, stage: str, work: Awaitable[_T]) -> _T:
        """Do it and measure it."""
        before_ms = self._used_ms()
        result = await work
        self._add(stage, before_ms)
        return result

    async def of_start(self, stage: str, work: Awaitable[QemuVm]) -> QemuVm:
        """The same, of a monitor that comes to be by it."""
        before_ms = self._used_ms()
        monitor = await work
        self.pids.append(monitor.pid)
        self._add(stage, before_ms)
        return monitor

    def _add(self, stage: str, before_ms: float) -> None:
        self.stages.setdefault(stage, []).append(self._used_ms() - before_ms)

    def _used_ms(self) -> float:
        return 1000 * (time.process_time() + sum(cpu_s(pid) for pid in self.pids))


async def alone(machines: Machines, folder: Path, clock: Clock) -> GuestVm:
    """As a machine starts for which nothing is ready."""
    spawning = template.spawn_shell(machines.template, folder=folder, jail=Jail())
    shell = await clock.of_start("monitor", spawning)
    begun = guest_vm.start_clone(shell, machines.template, name="alone")
    return await clock.of("names and first answer", begun)


async def split(parent: ForkServer, folder: Path, clock: Clock) -> GuestVm:
    """As a machine starts where there is a stem."""
    part = await clock.of_start("monitor", parent.spawn(folder))
    return await clock.of("names and first answer", guest_vm.start_child(part, name="split"))


async def use(guest: GuestVm, clock: Clock) -> None:
    """What environments do first."""
    await clock.of("two files written", write_tree(guest.channel, TREE, root=HOME))
    run = GuestCommands(channel=guest.channel).run
    await clock.of("a file read", GuestWorkspace(guest.channel, run, cwd=HOME).read("notes.txt"))
    for number, command in enumerate(COMMANDS, start=1):
        await clock.of(f"{number}. {command}", run(command, LIMIT_S))


async def measured(image: Path, count: int) -> tuple[Clock, Clock]:
    """Both kinds in turn, so that neighbours disturb both alike.

    Raises:
        RuntimeError: there is no C compiler.
    """
    with tempfile.TemporaryDirectory(prefix="etude-bench-") as name:
        folder = Path(name)
        library = preload_library.preload_library(folder)
        if library is None:
            raise RuntimeError("nothing can be split off without a C compiler (cc)")
        machines = await Machines.of(folder, image)
        (folder / "stem").mkdir()
        parent = await fork_server.start_fork_server(
            machines.template, library, folder=folder / "stem", jail=Jail()
        )
        one, other = Clock(), Clock()
        for number in range(count):
            for kind, clock in (("alone", one), ("split", other)):
                clock.pids = [parent.vm.pid] if kind == "split" else []
                place_of = folder / f"{kind}-{number}"
                place_of.mkdir()
                if kind == "split":
                    guest = await split(parent, place_of, clock)
                else:
                    guest = await alone(machines, place_of, clock)
                await use(guest, clock)
                await guest.destroy()
        await parent.destroy()
        await machines.close()
    return one, other


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20)
    given = parser.parse_args()
    agent = agent_here("stages of a start", "cc")
    if agent is None:
        return 0
    console = Console()
    cache = BuildCache(images_folder())
    image = build(demo_image.spec(), agent=agent, cache=cache, say=console.log)
    one, other = asyncio.run(measured(image.folder, given.count))
    load = os.getloadavg()[0]
    table = Table(f"CPU-ms, median of {given.count}, load {load:.1f}", "alone", "split", box=None)
    for stage, values in one.stages.items():
        both = [statistics.median(each) for each in (values, other.stages[stage])]
        table.add_row(stage, *(f"{each:.1f}" for each in both))
    console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
