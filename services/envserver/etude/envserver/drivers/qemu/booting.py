"""A template from an image: booted, with what its clones shall find done, and stopped."""

from collections.abc import Awaitable, Callable
from pathlib import Path

from etude.envserver.drivers.machines.guests import connected, warmed
from etude.envserver.drivers.machines.jail import Jail
from etude.envserver.drivers.qemu import template
from etude.envserver.drivers.qemu.machine import Machine
from etude.envserver.drivers.qemu.template import Template
from etude.envserver.guest.channel import GuestChannel
from etude.envserver.images.build import Image


async def booted(
    image: Image,
    machine: Machine,
    *,
    folder: Path,
    jail: Jail,
    warm_up: Callable[[GuestChannel], Awaitable[None]],
) -> Template:
    """A sealed template: booted until its agent answers, warmed up, stopped.

    Args:
        image: what it boots.
        machine: what it has.
        folder: an empty folder of its own.
        jail: whom the monitor runs as.
        warm_up: does what clones shall find done, such as reading what every command needs.

    Raises:
        GuestLostError: the agent does not answer; a note has the console's last words.
        VmmError: the monitor failed.
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
