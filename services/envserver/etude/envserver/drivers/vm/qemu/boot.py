"""Boot of a template from an image."""

from collections.abc import Awaitable, Callable
from pathlib import Path

from etude.envserver.drivers.machines.guests import connected, warmed
from etude.envserver.drivers.machines.jail import Jail
from etude.envserver.drivers.qemu import template
from etude.envserver.drivers.qemu.machine import Machine
from etude.envserver.drivers.qemu.template import Template
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
