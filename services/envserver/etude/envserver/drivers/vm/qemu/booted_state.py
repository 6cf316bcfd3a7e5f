"""State of a booted VM, from which clones are made."""

import os
from dataclasses import dataclass

from etude.envserver.drivers.vm.errors import FormatError
from etude.envserver.drivers.vm.qemu.command_line import QemuConfig
from etude.envserver.drivers.vm.qemu.stream_splicing import TemplateStream


@dataclass(frozen=True, slots=True, kw_only=True)
class BootedState:
    """Sealed state of a booted VM. It owns its file descriptors."""

    address: str
    compat_key: str
    machine: QemuConfig
    memory: int
    """Sealed file with the guest's memory."""
    devices: int
    """Sealed file with the device state."""
    stream: TemplateStream | FormatError
    """Parsed device state, or the reason why it cannot be parsed: then deltas are full streams."""
    root: int
    disk: int
    """Disk of that moment, which no process writes to."""

    def close(self) -> None:
        for descriptor in (self.memory, self.devices, self.root, self.disk):
            os.close(descriptor)
