"""QEMU template: boot once, keep memory, devices and disk, make clones."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from typing_extensions import override

from etude.common.errors import crossing
from etude.envserver.drivers.process_identity import ProcessId
from etude.envserver.drivers.vm import disk, sealed_files
from etude.envserver.drivers.vm.dirty_pages import PageBuffer
from etude.envserver.drivers.vm.errors import FormatError, VmmError
from etude.envserver.drivers.vm.interface import VmDelta, Vmm, VmTemplate, downcast
from etude.envserver.drivers.vm.jail import Jail
from etude.envserver.drivers.vm.qemu import command_line, delta, vm
from etude.envserver.drivers.vm.qemu.booted_state import BootedState
from etude.envserver.drivers.vm.qemu.command_line import (
    PROGRAM,
    SANDBOX,
    TRANSLATION_MIB,
    QemuConfig,
    VmmFiles,
)
from etude.envserver.drivers.vm.qemu.migration import receive
from etude.envserver.drivers.vm.qemu.stream_splicing import TemplateStream, parse
from etude.envserver.drivers.vm.qemu.vm import QemuVm

MEMORY_NAME = "template"
"""Name of the file with a template's memory, as VMMs see it."""
MAX_DEVICE_BYTES = 16 << 20
"""300 times the usual size, firmware included."""


async def spawn_shell(template: BootedState, *, folder: Path, jail: Jail) -> vm.QemuVm:
    """Start a VMM that waits for the template's state or a delta of it."""
    with new_disk(template, folder) as own_disk:

        def program(sockets: vm.VmmSockets) -> Sequence[str]:
            arguments = clone_arguments(
                template, sockets, own_disk, translation_mib=TRANSLATION_MIB
            )
            return (PROGRAM, *arguments, *SANDBOX)

        return await vm.start(
            template.machine,
            program,
            descriptors=(template.memory, template.root, own_disk),
            folder=folder,
            jail=jail,
            template=template.address,
        )


@contextlib.contextmanager
def new_disk(template: BootedState, folder: Path) -> Iterator[int]:
    """Create the empty disk of a clone, open for its VMM."""
    with crossing(VmmError, f"{folder}: the disk cannot be created"):
        descriptor = disk.create(folder, template.machine.disk_bytes)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def clone_arguments(
    template: BootedState,
    sockets: vm.VmmSockets,
    own_disk: int,
    *,
    translation_mib: int,
) -> Sequence[str]:
    """QEMU's arguments for a clone of a template."""
    files = VmmFiles(
        memory=template.memory,
        qmp=sockets.qmp,
        agent=sockets.agent,
        root=template.root,
        disk=own_disk,
    )
    return command_line.clone_arguments(template.machine, files, translation_mib=translation_mib)


async def restore_template(shell: vm.QemuVm, template: BootedState) -> None:
    """Restore the template's state in an idle VMM, paused.

    Raises:
        VmmError: the state was refused; the VMM is gone.
    """
    fill = partial(disk.fill_in, shell.folder, template.disk)
    await disk.run_copy(fill, disk.used_bytes(template.disk))
    with sealed_files.reopen(template.devices) as source:
        await receive(shell, source, has_memory=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class QemuTemplate(BootedState, VmTemplate):
    """Template of clones in QEMU."""

    @property
    @override
    def memory_bytes(self) -> int:
        return sum(512 * os.fstat(each).st_blocks for each in (self.memory, self.devices))

    @override
    async def spawn(self, folder: Path, jail: Jail) -> vm.QemuVm:
        return await spawn_shell(self, folder=folder, jail=jail)

    @override
    async def restore(self, shell: Vmm, saved: VmDelta | None) -> None:
        if saved is None:
            await restore_template(downcast(shell, QemuVm), self)
        else:
            await delta.restore_delta(downcast(shell, QemuVm), self, saved)

    @override
    async def save(self, vm: Vmm, buffer: PageBuffer, *, keep_running: bool, disk: Path) -> VmDelta:
        found = downcast(vm, QemuVm)
        return await delta.save_delta(found, self, buffer, keep_running=keep_running, disk=disk)

    @override
    async def adopt(self, folder: Path, process: ProcessId) -> vm.QemuVm:
        return await vm.adopt(self.machine, folder, process)


def parse_device_state(data: bytes, machine: QemuConfig) -> TemplateStream | FormatError:
    """Parse a device state for deltas, or return the reason why that is not possible."""
    try:
        stream = parse(data)
    except FormatError as error:
        return error
    if stream.memory_bytes != machine.memory_bytes:
        return FormatError(f"the stream is of a machine with {stream.memory_bytes} bytes")
    return stream
