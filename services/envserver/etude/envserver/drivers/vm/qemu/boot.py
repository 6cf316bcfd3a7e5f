"""Boot of a template from an image."""

import asyncio
import contextlib
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from etude.envserver.drivers.vm import disk, sealed_files
from etude.envserver.drivers.vm.errors import VmmError
from etude.envserver.drivers.vm.guest_vm import connect_agent, prepare_template
from etude.envserver.drivers.vm.jail import Jail
from etude.envserver.drivers.vm.qemu import command_line as machines
from etude.envserver.drivers.vm.qemu import vm
from etude.envserver.drivers.vm.qemu.command_line import (
    PROGRAM,
    SANDBOX,
    BootFiles,
    QemuConfig,
    VmmFiles,
)
from etude.envserver.drivers.vm.qemu.compatibility import compat_key
from etude.envserver.drivers.vm.qemu.migration import send
from etude.envserver.drivers.vm.qemu.template import (
    MAX_DEVICE_BYTES,
    MEMORY_NAME,
    QemuTemplate,
    parse_device_state,
)
from etude.envserver.drivers.vm.template_cache import template_address
from etude.envserver.guest.channel import GuestChannel
from etude.envserver.images.built_image import BuiltImage

KEPT_BYTES = 1 << 16
_READ_BYTES = 1 << 14


class BootConsole:
    """Reads a serial console and keeps its end, however much the guest writes."""

    def __init__(self) -> None:
        self._ours, self.theirs = socket.socketpair()
        """The VMM inherits `theirs`."""
        self._ours.settimeout(0)
        self._kept = bytearray()
        asyncio.get_running_loop().add_reader(self._ours, self._read)

    def tail(self) -> str:
        return self._kept.decode(errors="replace")

    def close(self) -> None:
        if self._ours.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._ours)
        self._ours.close()
        self.theirs.close()

    def _read(self) -> None:
        try:
            data = self._ours.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except ConnectionResetError:
            data = b""
        if not data:
            asyncio.get_running_loop().remove_reader(self._ours)
        self._kept += data
        del self._kept[:-KEPT_BYTES]


@dataclass(frozen=True, slots=True, kw_only=True)
class BootingVm:
    """A booting VM that becomes a template."""

    vm: vm.QemuVm
    console: BootConsole
    image: BuiltImage
    memory: int
    root: int

    async def abandon(self) -> None:
        await self.vm.destroy()
        self.console.close()
        for descriptor in (self.memory, self.root):
            os.close(descriptor)


async def boot(
    image: BuiltImage,
    machine: QemuConfig,
    *,
    folder: Path,
    jail: Jail,
) -> BootingVm:
    """Boot a VM from its image; its agent answers seconds later.

    Raises:
        VmmError: the VMM did not start.
    """
    console = BootConsole()
    with contextlib.ExitStack() as opened:
        opened.callback(console.theirs.close)
        kernel, initramfs = (_open_file(opened, path) for path in (image.kernel, image.initramfs))
        own_disk = await _new_disk(opened, machine, folder)
        root = os.open(image.root, os.O_RDONLY | os.O_CLOEXEC)
        memory = sealed_files.create(MEMORY_NAME, machine.memory_bytes)
        files = BootFiles(kernel=kernel, initramfs=initramfs, console=console.theirs.fileno())

        def arguments(sockets: vm.VmmSockets) -> Sequence[str]:
            wiring = VmmFiles(
                memory=memory, qmp=sockets.qmp, agent=sockets.agent, root=root, disk=own_disk
            )
            return (PROGRAM, *machines.boot_arguments(machine, wiring, files), *SANDBOX)

        inherited = (memory, root, kernel, initramfs, files.console, own_disk)
        try:
            started = await vm.start(
                machine, arguments, descriptors=inherited, folder=folder, jail=jail
            )
        except BaseException:
            console.close()
            os.close(memory)
            os.close(root)
            raise
    return BootingVm(vm=started, console=console, image=image, memory=memory, root=root)


async def seal(booting: BootingVm) -> QemuTemplate:
    """Pause the VM and seal its state as a template; the VMM ends.

    Raises:
        VmmError: the VMM did not write its state; the VM is gone.
    """
    machine, running = booting.vm.machine, booting.vm
    devices, own_disk = sealed_files.create("devices"), -1
    try:
        await running.freeze()
        await send(running, devices, leaves_memory=True)
        own_disk = disk.open_disk(running.folder / disk.DISK)
        await running.destroy()
        # Possible only now: the VMM had mapped the memory for writing.
        sealed_files.seal(booting.memory)
        sealed_files.seal(devices)
        data = _device_data(devices)
        key = compat_key(machine, booting.image)
        # On a thread: 0.1 s for 256 MiB.
        address = await asyncio.to_thread(_address, key, booting.memory, data, own_disk)
    except BaseException:
        os.close(devices)
        if own_disk >= 0:
            os.close(own_disk)
        await booting.abandon()
        raise
    booting.console.close()
    return QemuTemplate(
        address=address,
        compat_key=key,
        machine=machine,
        memory=booting.memory,
        devices=devices,
        stream=parse_device_state(data, machine),
        root=booting.root,
        disk=own_disk,
    )


def _address(key: str, memory: int, devices: bytes, own_disk: int) -> str:
    return template_address(key, memory, devices, disk.digest(own_disk))


def _device_data(devices: int) -> bytes:
    """Read the device state that the VMM wrote.

    Raises:
        VmmError: it is too large for our few devices.
    """
    if (size := os.fstat(devices).st_size) > MAX_DEVICE_BYTES:
        raise VmmError(f"the template's device state has {size} bytes")
    return sealed_files.read_all(devices)


async def boot_template(
    image: BuiltImage,
    machine: QemuConfig,
    *,
    folder: Path,
    jail: Jail,
    warm_up: Callable[[GuestChannel], Awaitable[None]],
) -> QemuTemplate:
    """Boot an image until its agent answers, prewarm it, and seal it as a template."""
    booting = await boot(image, machine, folder=folder, jail=jail)
    try:
        channel = await connect_agent(booting.vm)
        await prepare_template(channel, warm_up)
    except BaseException as error:
        error.add_note(booting.console.tail())
        await booting.abandon()
        raise
    return await seal(booting)


async def _new_disk(stack: contextlib.ExitStack, machine: QemuConfig, folder: Path) -> int:
    descriptor = await asyncio.to_thread(disk.create_formatted, folder, machine.disk_bytes)
    stack.callback(os.close, descriptor)
    return descriptor


def _open_file(stack: contextlib.ExitStack, path: Path) -> int:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    stack.callback(os.close, descriptor)
    return descriptor
