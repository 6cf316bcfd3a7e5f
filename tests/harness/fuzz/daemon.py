"""python -m tests.harness.fuzz.daemon SEED: `etude-envserver node` whose guests are hostile.

All of it is the real one, but for what starts a machine: a process stands for it that serves a
monitor's and an agent's socket and says what it likes.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from dataclasses import dataclass, field
from pathlib import Path
from typing import Never

from tests.harness.fuzz.channels import Counting
from tests.harness.fuzz.hostile import HONEST
from typing_extensions import override

from etude.agent.workspace.interface import Runner
from etude.common.api.pool.spec import EnvPoolSpec
from etude.envserver.drivers import process_identity
from etude.envserver.drivers.base import (
    CommandOutcome,
    Driver,
    DriverCapabilities,
    IsolationStrength,
    Sandbox,
    SandboxError,
    StartKind,
    Verification,
)
from etude.envserver.drivers.selection import DriverFolders
from etude.envserver.drivers.vm import vmm_process
from etude.envserver.drivers.vm.dirty_pages import PageBuffer
from etude.envserver.drivers.vm.guest_vm import GuestVm
from etude.envserver.drivers.vm.jail import Jail
from etude.envserver.drivers.vm.qemu import vm
from etude.envserver.drivers.vm.qemu.command_line import QemuConfig
from etude.envserver.drivers.vm.sandbox import VmSandbox
from etude.envserver.drivers.vm.start.start_scheduler import RunSlots
from etude.envserver.drivers.vm.start.starter import StartedVm
from etude.envserver.drivers.vm.suspend.idle_policy import IdleTimeouts
from etude.envserver.drivers.vm.suspend.lease_vm import SuspendStore, VmContext
from etude.envserver.guest import frames
from etude.envserver.guest.channel import GuestChannel, GuestIdentity
from etude.envserver.host import server
from etude.envserver.settings import HostSettings

TAKEN = "taken"
"""File in the node's folder: the frames that its channels have parsed or refused."""
GOOD = "good"
"""While it is there, guests are honest."""


_CAPS = DriverCapabilities(files=False, memory=False, freeze=True)


def _no_starter() -> Never:
    raise SandboxError("these machines cannot be saved")


@dataclass(slots=True)
class HostileDriver(Driver):
    """Machines of the real driver's make around processes that are none."""

    scratch: Path
    seed: str
    name: str = "hostile"
    strength: IsolationStrength = IsolationStrength.STRONG
    caps: DriverCapabilities = _CAPS
    start_kind: StartKind | None = None
    leases: Path = field(init=False)
    _maker: Process | None = None
    _making: asyncio.Lock = field(default_factory=asyncio.Lock)
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count)
    _parsers: list[Counting] = field(default_factory=list)
    _bed: SuspendStore = field(
        default_factory=lambda: SuspendStore(key=b"k", buffer=PageBuffer(4096))
    )
    _places: RunSlots = field(default_factory=lambda: RunSlots(4, 1.0))
    _telling: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        self.leases = self.scratch / "leases"

    @override
    async def start(self) -> None:
        command = (sys.executable, "-m", "tests.harness.fuzz.hostile")
        with (self.scratch / "guests.log").open("ab") as log:
            self._maker = await asyncio.create_subprocess_exec(
                *command, stdin=PIPE, stdout=PIPE, stderr=log
            )
        self._telling = asyncio.create_task(self._tell(), name="count frames")

    @override
    async def stop(self) -> None:
        if self._telling is not None:
            self._telling.cancel()
        self._write()
        if self._maker is not None:
            with contextlib.suppress(ProcessLookupError):  # it had the same signal
                self._maker.kill()
            await self._maker.wait()

    @override
    def sandbox(self, folder: Path, runner: Runner, *, template: str) -> Sandbox:
        home = VmContext(
            lease=folder,
            start=self._begun,
            starter=_no_starter,
            suspend_store=self._bed,
            run_slots=self._places,
            idle_timeouts=IdleTimeouts(linger_s=0.02, frozen_s=3600.0),
        )
        return VmSandbox(folder, runner, home)

    @override
    async def verify(self, work: Verification) -> CommandOutcome:
        raise SandboxError("nothing is graded here")

    async def _begun(self, folder: Path) -> StartedVm:
        pid = await self._made(folder)
        machine = vm._watch(QemuConfig(tsc_khz=1), folder, pid, os.pidfd_open(pid), lambda: None)
        uid = vmm_process.vmm_uid(Jail().uid)
        machine.save_record(process_identity.identify(pid), uid=uid, template="")
        try:
            await machine.connect()
            reader, writer = await asyncio.open_unix_connection(sock=await machine.agent())
            parser = Counting(frames.FROM_GUEST)
            self._parsers.append(parser)
            channel = GuestChannel(reader, writer, ack_timeout_s=60, _parser=parser)
            await channel.reset()
            identity = GuestIdentity(env_id=folder.parent.name, token=b"t", generation=1)
            await channel.sync(identity)
        except BaseException:
            await machine.destroy()
            raise
        return StartedVm(GuestVm(machine, channel, identity), StartKind.SPAWN)

    async def _made(self, folder: Path) -> int:
        is_good = (self.scratch / GOOD).exists()
        seed = HONEST if is_good else f"{self.seed} {next(self._numbers)}"
        async with self._making:
            assert self._maker is not None
            assert self._maker.stdin is not None
            assert self._maker.stdout is not None
            self._maker.stdin.write(f"{folder}\t{seed}\n".encode())
            return int(await self._maker.stdout.readline())

    async def _tell(self) -> None:
        while True:
            await asyncio.sleep(0.2)
            self._write()

    def _write(self) -> None:
        taken = sum(parser.num_taken + parser.num_refused for parser in self._parsers)
        refused = sum(parser.num_refused for parser in self._parsers)
        partial = self.scratch / f".{TAKEN}"
        partial.write_text(f"{taken} {refused}")
        partial.rename(self.scratch / TAKEN)


def main() -> None:
    """Serve until told to stop."""
    logging.basicConfig(level=logging.INFO)
    settings = HostSettings.from_env()

    async def hostile(spec: EnvPoolSpec, place: DriverFolders) -> Driver:
        return HostileDriver(place.scratch, f"{sys.argv[1]} {spec.slots_per_replica}")

    vars(server)["selected"] = hostile
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    asyncio.run(server.serve(settings))


if __name__ == "__main__":
    main()
