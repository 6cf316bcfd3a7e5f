"""Handing an open file to a monitor, which then finds it by number."""

from typing import NamedTuple

from etude.envserver.drivers.machines.errors import VmmError
from etude.envserver.drivers.qemu.qmp import Qmp


class Handed(NamedTuple):
    """A file as the monitor knows it."""

    fdset: int
    """Opened as /dev/fdset/N; given back with `remove-fd`."""
    descriptor: int
    """Its number in the monitor's process."""


async def hand_over(qmp: Qmp, descriptor: int) -> Handed:
    """Give a file to the monitor.

    Raises:
        VmmError: the monitor does not take it.
    """
    match await qmp.execute("add-fd", descriptors=(descriptor,)):
        case {"fdset-id": int(fdset), "fd": int(number)} if fdset >= 0 and number >= 0:
            return Handed(fdset, number)
        case other:
            raise VmmError(f"add-fd: the answer {str(other)[:100]} has no numbers")
