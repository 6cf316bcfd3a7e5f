"""What is kept of a machine that has booted."""

import os
from dataclasses import dataclass

from etude.envserver.drivers.machines.errors import FormatError
from etude.envserver.drivers.qemu.machine import Machine
from etude.envserver.drivers.qemu.stream import TemplateStream


@dataclass(frozen=True, slots=True, kw_only=True)
class Booted:
    """The sealed state of a machine that has booted. It owns its file descriptors."""

    address: str
    """Digest of memory, devices and of what they run on: deltas name the template by it."""
    compat_key: str
    machine: Machine
    memory: int
    """Sealed file with the guest's memory."""
    devices: int
    """Sealed file with the device state."""
    stream: TemplateStream | FormatError
    """The device state taken apart, or why that is not possible: deltas are full streams then."""
    root: int
    disk: tuple[int, ...] = ()
    """Layers of the disk, each based on the next, for reading only."""

    def close(self) -> None:
        """Give the files back; clones that run keep theirs."""
        for descriptor in (self.memory, self.devices, self.root, *self.disk):
            os.close(descriptor)
