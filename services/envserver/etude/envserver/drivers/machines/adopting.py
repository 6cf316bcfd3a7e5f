"""Adoption of VMs that an earlier process of this host left running."""

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
"""Adoptions that run concurrently: each waits for its own VMM; frozen VMs are not woken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopted:
    """Outcome of an adoption."""

    guests: Mapping[Path, Guest]
    """VMs that were adopted, by VM folder."""
    lost: Mapping[Path, str]
    """Reasons why the others were not; their processes are ended."""


async def adopt(left: Mapping[Path, VmRecord], templates: Mapping[str, Base]) -> Adopted:
    """Adopt VMs.

    Args:
        left: records of leases' VMs, by VM folder.
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
    """Adopt one VM: a running one gets a new token, a frozen one stays frozen.

    Raises:
        VmmError: the VMM has ended, or its state cannot be resumed.
        GuestLostError: the guest agent does not answer.
    """
    base = templates.get(noted.template)
    if base is None:
        await asyncio.to_thread(census.end, [noted.process])
        raise VmmError("its template is not booted any more")
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
