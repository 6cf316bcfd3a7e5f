"""File descriptors passed to a VMM."""

from typing import NamedTuple

from etude.envserver.drivers.machines.errors import VmmError
from etude.envserver.drivers.qemu.qmp import Qmp


class Handed(NamedTuple):
    """A file as the VMM knows it."""

    fdset: int
    """Opened as /dev/fdset/N; closed with `remove-fd`."""
    descriptor: int
    """Descriptor number in the VMM's process."""


async def hand_over(qmp: Qmp, descriptor: int) -> Handed:
    """Pass a file to the VMM.

    Raises:
        VmmError: the VMM refuses it.
    """
    match await qmp.execute("add-fd", descriptors=(descriptor,)):
        case {"fdset-id": int(fdset), "fd": int(number)} if fdset >= 0 and number >= 0:
            return Handed(fdset, number)
        case other:
            raise VmmError(f"add-fd: the answer {str(other)[:100]} has no numbers")
