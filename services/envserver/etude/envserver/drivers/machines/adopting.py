"""Taking up the machines of an earlier process of this node, which go on as if nothing had been."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from etude.envserver.drivers.machines import census, guests
from etude.envserver.drivers.machines.errors import VmmError
from etude.envserver.drivers.machines.guests import Guest
from etude.envserver.drivers.machines.protocol import Base
from etude.envserver.drivers.machines.record import VmRecord
from etude.envserver.guest.channel import GuestLostError

AT_ONCE = 8
"""Each waits for its own monitor; those that stand still are not woken, which takes longest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopted:
    """What became of the machines that an earlier process left."""

    guests: Mapping[Path, Guest]
    """Those that go on, by the machine's folder."""
    lost: Mapping[Path, str]
    """Why others do not; their processes are ended."""


async def adopt(left: Mapping[Path, VmRecord], templates: Mapping[str, Base]) -> Adopted:
    """Take up machines.

    Args:
        left: the machines of leases, by folder.
        templates: by address.
    """
    places = asyncio.Semaphore(AT_ONCE)

    async def one(folder: Path, noted: VmRecord) -> Guest | str:
        async with places:
            try:
                return await _adopted(folder, noted, templates)
            except (VmmError, GuestLostError) as error:
                return str(error)

    found = await asyncio.gather(*(one(folder, noted) for folder, noted in left.items()))
    outcomes = dict(zip(left, found, strict=True))
    return Adopted(
        guests={at: each for at, each in outcomes.items() if isinstance(each, Guest)},
        lost={at: each for at, each in outcomes.items() if isinstance(each, str)},
    )


async def _adopted(folder: Path, noted: VmRecord, templates: Mapping[str, Base]) -> Guest:
    """One machine: running and answering under a new token, or standing still as it was found.

    Raises:
        VmmError: it has ended, or is in a state from which it does not go on.
        GuestLostError: its agent does not answer.
    """
    base = templates.get(noted.template)
    if base is None:
        await asyncio.to_thread(census.end, [noted.process])
        raise VmmError("it is a machine of a template that is not booted any more")
    found = await base.adopt(folder, noted.process)
    try:
        return await guests.taken_up(
            found,
            name=noted.env_id,
            generation=noted.generation,
            is_stopped=await found.is_stopped(),
        )
    except BaseException:
        await found.kill()
        raise
