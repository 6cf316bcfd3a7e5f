"""QEMU template: boot once, keep memory and devices, make clones."""

import asyncio
import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3
from typing_extensions import override

from etude.envserver.drivers.process_identity import ProcessId
from etude.envserver.drivers.vm import sealed_files
from etude.envserver.drivers.vm.dirty_pages import PAGE_BYTES, PageBuffer
from etude.envserver.drivers.vm.errors import FormatError, VmmError
from etude.envserver.drivers.vm.interface import Base, Delta, Monitor, own
from etude.envserver.drivers.vm.jail import Jail
from etude.envserver.drivers.vm.qemu import command_line as machines
from etude.envserver.drivers.vm.qemu import delta, vm
from etude.envserver.drivers.vm.qemu.boot import Console
from etude.envserver.drivers.vm.qemu.booted_state import Booted
from etude.envserver.drivers.vm.qemu.command_line import (
    SHARED_TRANSLATION_MIB,
    TRANSLATION_MIB,
    Boot,
    Machine,
    Wiring,
)
from etude.envserver.drivers.vm.qemu.compatibility import compat_key
from etude.envserver.drivers.vm.qemu.disk import Disk, frozen
from etude.envserver.drivers.vm.qemu.migration import receive, send
from etude.envserver.drivers.vm.qemu.stream_splicing import TemplateStream, parse
from etude.envserver.drivers.vm.qemu.vm import Vm
from etude.envserver.images.built_image import Image


async def spawn_shell(
    template: Booted,
    *,
    folder: Path,
    jail: Jail,
    disk: Sequence[int] = (),
    preload: vm.Preload | None = None,
) -> vm.Vm:
    """Start a VMM that waits for the template's state or a delta of it.

    Args:
        template: its template.
        folder: an empty folder.
        jail: user and limits of the process.
        disk: files of its disk, if it has one.
        preload: makes it a fork server.

    Raises:
        VmmError: it did not start.
    """

    def arguments(sockets: vm.Sockets) -> Sequence[str]:
        wiring = Wiring(
            memory=template.memory,
            qmp=sockets.qmp,
            agent=sockets.agent,
            root=template.root,
            disk=disk,
        )
        room_mib = TRANSLATION_MIB if preload is None else SHARED_TRANSLATION_MIB
        return machines.clone_arguments(template.machine, wiring, translation_mib=room_mib)

    inherited = (template.memory, template.root, *disk)
    return await vm.start(
        template.machine,
        arguments,
        descriptors=inherited,
        folder=folder,
        jail=jail,
        template=template.address,
        preload=preload,
    )


async def restore(shell: vm.Vm, template: Booted) -> None:
    """Restore the template's state in an idle VMM, paused.

    Raises:
        VmmError: the state was refused; the VMM is gone.
    """
    with sealed_files.opened(template.devices) as source:
        await receive(shell, source, has_memory=False)


MEMORY_NAME = "template"
"""Name of the file with a template's memory, as VMMs see it."""
MAX_DEVICE_BYTES = 16 << 20
"""300 times the usual size, firmware included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Template(Booted, Base):
    """Template of clones in QEMU."""

    @override
    async def spawn(self, folder: Path, jail: Jail) -> vm.Vm:
        return await spawn_shell(self, folder=folder, jail=jail)

    @override
    async def restore(self, shell: Monitor, saved: Delta | None) -> None:
        if saved is None:
            await restore(own(shell, Vm), self)
        else:
            await delta.restore(own(shell, Vm), self, saved)

    @override
    async def take(self, vm: Monitor, buffer: PageBuffer, *, keep_running: bool) -> Delta:
        return await delta.take(own(vm, Vm), self, buffer, keep_running=keep_running)

    @override
    async def adopt(self, folder: Path, process: ProcessId) -> vm.Vm:
        return await vm.adopt(self.machine, folder, process)


@dataclass(frozen=True, slots=True, kw_only=True)
class Booting:
    """A booting VM that becomes a template."""

    vm: vm.Vm
    console: Console
    image: Image
    memory: int
    root: int
    disk: Disk | None

    async def abandon(self) -> None:
        """End it and close its files."""
        await self.vm.destroy()
        self.console.close()
        if self.disk is not None:
            self.disk.close()
        for descriptor in (self.memory, self.root):
            os.close(descriptor)


async def boot(
    image: Image, machine: Machine, *, folder: Path, jail: Jail, disk: Disk | None = None
) -> Booting:
    """Boot a VM from its image; its agent answers seconds later.

    Args:
        image: the image to boot.
        machine: configuration of the VM.
        folder: an empty folder.
        jail: user and limits of the VMM.
        disk: its disk, if it has one; the template takes it over.

    Raises:
        VmmError: the VMM did not start.
    """
    console = Console()
    with contextlib.ExitStack() as opened:
        opened.callback(console.theirs.close)
        kernel, initramfs = (_opened(opened, path) for path in (image.kernel, image.initramfs))
        root = os.open(image.root, os.O_RDONLY | os.O_CLOEXEC)
        memory = sealed_files.create(MEMORY_NAME, machine.memory_bytes)
        layers = disk.chain if disk is not None else ()
        files = Boot(kernel=kernel, initramfs=initramfs, console=console.theirs.fileno())

        def arguments(sockets: vm.Sockets) -> Sequence[str]:
            wiring = Wiring(
                memory=memory, qmp=sockets.qmp, agent=sockets.agent, root=root, disk=layers
            )
            return machines.boot_arguments(machine, wiring, files)

        inherited = (memory, root, kernel, initramfs, files.console, *layers)
        try:
            started = await vm.start(
                machine, arguments, descriptors=inherited, folder=folder, jail=jail
            )
        except BaseException:
            console.close()
            os.close(memory)
            os.close(root)
            raise
    return Booting(vm=started, console=console, image=image, memory=memory, root=root, disk=disk)


async def seal(booting: Booting) -> Template:
    """Pause the VM and seal its state as a template; the VMM ends.

    Raises:
        VmmError: the VMM did not write its state; the VM is gone.
    """
    machine, running = booting.vm.machine, booting.vm
    devices = sealed_files.create("devices")
    try:
        await running.freeze()
        await send(running, devices, leaves_memory=True)
        await running.destroy()
        # Possible only now: the VMM had mapped the memory for writing.
        sealed_files.seal(booting.memory)
        sealed_files.seal(devices)
        data = _device_data(devices)
        key = compat_key(machine, booting.image)
        # On a thread: 0.1 s for 256 MiB.
        address = await asyncio.to_thread(address_of, key, booting.memory, data)
    except BaseException:
        os.close(devices)
        await booting.abandon()
        raise
    booting.console.close()
    return Template(
        address=address,
        compat_key=key,
        machine=machine,
        memory=booting.memory,
        devices=devices,
        stream=taken_apart(data, machine),
        root=booting.root,
        disk=_frozen(booting.disk),
    )


def _device_data(devices: int) -> bytes:
    """Read the device state that the VMM wrote.

    Raises:
        VmmError: it is too large for our few devices.
    """
    if (size := os.fstat(devices).st_size) > MAX_DEVICE_BYTES:
        raise VmmError(f"the template's device state has {size} bytes")
    return sealed_files.content(devices)


def _frozen(disk: Disk | None) -> tuple[int, ...]:
    if disk is None:
        return ()
    layers = frozen(disk)
    disk.close()
    return layers


def taken_apart(data: bytes, machine: Machine) -> TemplateStream | FormatError:
    """Parse a device state for deltas, or return the reason why that is not possible."""
    try:
        stream = parse(data)
    except FormatError as error:
        return error
    if stream.memory_bytes != machine.memory_bytes:
        return FormatError(f"the stream is of a machine with {stream.memory_bytes} bytes")
    return stream


def address_of(key: str, memory: int, devices: bytes) -> str:
    """Compute the address of a template from its content.

    Pages of zeros are ignored: reading a hole of the memory allocates one.

    Args:
        key: its compat_key.
        memory: descriptor of a file with the guest's memory.
        devices: the device state.
    """
    numbers, contents = blake3(), blake3()
    for offset, pages in sealed_files.pages(memory):
        numbers.update((offset // PAGE_BYTES).to_bytes(8, "big"))
        numbers.update((len(pages) // PAGE_BYTES).to_bytes(8, "big"))
        contents.update(pages)
    parts = (key.encode(), blake3(devices).digest(), numbers.digest(), contents.digest())
    return blake3(b"".join(parts)).hexdigest()


def _opened(stack: contextlib.ExitStack, path: Path) -> int:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    stack.callback(os.close, descriptor)
    return descriptor
