"""Clones of a template, on a copy-on-write view of its memory."""

from collections.abc import Sequence
from pathlib import Path

from etude.envserver.drivers.machines import sealed
from etude.envserver.drivers.machines.jail import Jail
from etude.envserver.drivers.qemu import machine as machines
from etude.envserver.drivers.qemu import vm
from etude.envserver.drivers.qemu.booted import Booted
from etude.envserver.drivers.qemu.machine import (
    SHARED_TRANSLATION_MIB,
    TRANSLATION_MIB,
    Wiring,
)
from etude.envserver.drivers.qemu.migration import receive


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
    with sealed.opened(template.devices) as source:
        await receive(shell, source, has_memory=False)
