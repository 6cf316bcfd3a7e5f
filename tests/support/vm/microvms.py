"""Real microVMs for tests: a small image with the real agent in it, and clones that talk."""

import asyncio
import importlib.util
import itertools
import secrets
from dataclasses import dataclass, field
from pathlib import Path

from etude.common.run_folder.state import images_folder
from etude.envserver.drivers.vm import disk, host_cpu
from etude.envserver.drivers.vm.dirty_pages import PageBuffer
from etude.envserver.drivers.vm.interface import VmDelta
from etude.envserver.drivers.vm.jail import Jail
from etude.envserver.drivers.vm.qemu import boot, delta, template
from etude.envserver.drivers.vm.qemu.command_line import QemuConfig
from etude.envserver.drivers.vm.qemu.template import QemuTemplate
from etude.envserver.drivers.vm.qemu.vm import QemuVm
from etude.envserver.guest.channel import GuestChannel, GuestIdentity
from etude.envserver.guest.commands import GuestCommands
from etude.envserver.images import spec as specs
from etude.envserver.images.build_cache import BuildCache
from etude.envserver.images.builder import build
from etude.envserver.images.built_image import BuiltImage

ROOT = Path(__file__).parents[3]
BOOT_LIMIT_S = 180
"""Two seconds of CPU time on an idle machine; neighbours may hold every core."""
COMMAND_LIMIT_S = 120
DISK_MIB = 128


def guest_agent() -> Path:
    """The agent, built if it is not there.

    Raises:
        RuntimeError: there is no Go, or the build fails.
    """
    spec = importlib.util.spec_from_file_location("hack_guest", ROOT / "hack" / "guest.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    program: Path = module.build()
    return program


def small_image(*, service: str = "") -> BuiltImage:
    """Busybox and the agent: 12 s to build from nothing, most of it the kernel's download."""
    spec = specs.ImageSpec(
        name="served" if service else "small",
        base=specs.ImageBase(busybox=specs.BusyboxBase()),
        services=(specs.Service(start=service),) if service else (),
    )
    return build(spec, agent=guest_agent(), cache=BuildCache(images_folder()))


def small_machine() -> QemuConfig:
    return QemuConfig(memory_mib=256, disk_mib=DISK_MIB, tsc_khz=host_cpu.host_tsc_khz())


async def connected(vm: QemuVm) -> GuestChannel:
    """A channel to the agent of a machine."""
    reader, writer = await asyncio.open_unix_connection(sock=await vm.agent())
    return GuestChannel(reader, writer)


async def booted(image: BuiltImage, machine: QemuConfig, folder: Path) -> QemuTemplate:
    """A template in an empty folder: booted until the agent says hello, reset, and sealed."""
    booting = await boot.boot(image, machine, folder=folder, jail=Jail())
    try:
        channel = await connected(booting.vm)
        await channel.hello(timeout_s=BOOT_LIMIT_S)
        await channel.reset()
        await channel.close()
    except BaseException as error:
        error.add_note(booting.console.tail())
        await booting.abandon()
        raise
    return await boot.seal(booting)


@dataclass(slots=True)
class Guest:
    """A running clone."""

    vm: QemuVm
    channel: GuestChannel

    async def sh(self, command: str) -> str:
        """What a command prints; the user is root, so that /tmp and /dev are open."""
        commands = GuestCommands(channel=self.channel, uid=0)
        done = await commands.run(command, COMMAND_LIMIT_S)
        assert done.exit_code == 0, (command, done)
        return done.output.decode().strip()


@dataclass(slots=True)
class Lab:
    """Makes machines of one template, and ends all of them."""

    template: QemuTemplate
    folder: Path
    buffer: PageBuffer = field(default_factory=lambda: PageBuffer(32 << 20))
    _vms: list[QemuVm] = field(default_factory=list)
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count)

    def new_folder(self) -> Path:
        found = self.folder / f"vm-{next(self._numbers)}"
        found.mkdir()
        return found

    async def shell(self) -> QemuVm:
        """A monitor that waits."""
        folder = self.new_folder()
        made = await template.spawn_shell(self.template, folder=folder, jail=Jail())
        self._vms.append(made)
        return made

    async def paused(self, saved: VmDelta | None = None) -> QemuVm:
        """A restored machine that has not run yet."""
        shell = await self.shell()
        if saved is None:
            await template.restore_template(shell, self.template)
        else:
            await delta.restore_delta(shell, self.template, saved)
        return shell

    async def guest(self, saved: VmDelta | None = None) -> Guest:
        """A machine that runs and has become itself."""
        return await self.awake(await self.paused(saved))

    async def awake(self, vm: QemuVm) -> Guest:
        """Let a restored machine run, and make it itself."""
        await vm.thaw()
        channel = await connected(vm)
        await channel.reset()
        name = secrets.token_hex(4)
        await channel.sync(
            GuestIdentity(env_id=name, token=secrets.token_bytes(16), generation=1, hostname=name)
        )
        return Guest(vm, channel)

    async def save(self, guest: Guest, *, keep_running: bool = True) -> VmDelta:
        assert await guest.channel.ping(timeout_s=COMMAND_LIMIT_S)
        return await delta.save_delta(
            guest.vm,
            self.template,
            self.buffer,
            keep_running=keep_running,
            disk=self.folder / disk.PARTIAL,
        )

    async def close(self) -> None:
        for vm in self._vms:
            await vm.destroy()
