"""Boot of a template from an image."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

from etude.envserver.drivers.vm.guest_vm import connected, warmed
from etude.envserver.drivers.vm.jail import Jail
from etude.envserver.drivers.vm.qemu import template
from etude.envserver.drivers.vm.qemu.command_line import Machine
from etude.envserver.drivers.vm.qemu.template import Template
from etude.envserver.guest.channel import GuestChannel
from etude.envserver.images.built_image import Image


async def booted(
    image: Image,
    machine: Machine,
    *,
    folder: Path,
    jail: Jail,
    warm_up: Callable[[GuestChannel], Awaitable[None]],
) -> Template:
    """Boot an image until its agent answers, prewarm it, and seal it as a template.

    Args:
        image: the image to boot.
        machine: configuration of the VM.
        folder: an empty folder.
        jail: user and limits of the VMM.
        warm_up: prewarms the guest.

    Raises:
        GuestLostError: the agent does not answer; a note has the end of the console.
        VmmError: the VMM failed.
    """
    booting = await template.boot(image, machine, folder=folder, jail=jail)
    try:
        channel = await connected(booting.vm)
        await warmed(channel, warm_up)
    except BaseException as error:
        error.add_note(booting.console.tail())
        await booting.abandon()
        raise
    return await template.seal(booting)


KEPT_BYTES = 1 << 16
_READ_BYTES = 1 << 14


class Console:
    """Reads a serial console and keeps its end, however much the guest writes."""

    def __init__(self) -> None:
        self._ours, self.theirs = socket.socketpair()
        """The VMM inherits `theirs`."""
        self._ours.settimeout(0)
        self._kept = bytearray()
        asyncio.get_running_loop().add_reader(self._ours, self._read)

    def tail(self) -> str:
        """End of the output."""
        return self._kept.decode(errors="replace")

    def close(self) -> None:
        """Stop reading; safe to repeat."""
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
