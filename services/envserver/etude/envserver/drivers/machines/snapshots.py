"""Machines of leases saved as files, and leases that begin with such a file.

A saved machine is what a sleeping one is: a file beside the others of its lease, from which it is
made again when the next call comes. So a fork is a second name of the file, and costs nothing yet.
"""

import asyncio
import os
from pathlib import Path

from etude.agent.workspace import notes
from etude.envserver import folders
from etude.envserver.drivers import saving
from etude.envserver.drivers.base import Saved
from etude.envserver.drivers.machines import stored
from etude.envserver.drivers.machines.errors import IntegrityError
from etude.envserver.drivers.machines.idle import State
from etude.envserver.drivers.machines.resting import RestingGuest
from etude.envserver.drivers.machines.sleeping import Bed, asleep
from etude.envserver.folders import Limits, TooLargeError

DELTA = "delta"
_PARTIAL = "restored.partial"
_CODE_DIGITS = 64
"""Of a digest those of the machine, which those of what tools have noted follow."""


async def save(guest: RestingGuest, lease: Path, target: Path, limits: Limits) -> Saved:
    """Write a machine and what tools have noted into an empty folder; it goes on.

    Raises:
        TooLargeError: that is more than the limits allow.
        SandboxError: the machine failed.
        OSError: a file cannot be written.
    """
    path, sleeps = target / DELTA, asleep(lease)
    if guest.state is State.SAVED and sleeps is not None:
        os.link(sleeps, path)
    else:
        async with guest.awake():
            await guest.machine.copy(path, max_bytes=limits.max_bytes)
    left = limits.max_bytes - path.stat().st_size
    if left < 0:
        raise TooLargeError(f"the machine takes {path.stat().st_size} bytes")
    rest = limits._replace(max_bytes=left)
    noted = await asyncio.to_thread(saving.save, lease, _parts(), target, rest)
    return Saved(
        num_bytes=path.stat().st_size + noted.num_bytes,
        digest=stored.digest(path) + noted.digest,
    )


def check(source: Path, saved: Saved, bed: Bed, template: str) -> None:
    """See that a machine is the one that was saved, and can be made again. Call it on a thread.

    Raises:
        IntegrityError: it is not, or cannot.
        OSError: it cannot be read.
    """
    path = source / DELTA
    stored.load(path, key=bed.key, template=template, proven=bed.proven).close()
    if stored.digest(path) != saved.digest[:_CODE_DIGITS]:
        raise IntegrityError(f"{source}: is another snapshot than the one that is meant")


def prepare(source: Path, saved: Saved, lease: Path) -> None:
    """Put what was saved beside what a lease is; put() and replace_notes() do the rest.

    Raises:
        CorruptError: what tools had noted is not what was saved.
        OSError: something cannot be read or written.
    """
    noted = Saved(num_bytes=0, digest=saved.digest[_CODE_DIGITS:])
    saving.prepare(source, _parts(), lease, noted)
    partial = lease / _PARTIAL
    partial.unlink(missing_ok=True)
    os.link(source / DELTA, partial)


def put(lease: Path, generation: int) -> None:
    """Let the machine that was prepared be the lease's, asleep."""
    present = asleep(lease)
    (lease / _PARTIAL).rename(present or lease / f"asleep.{generation}")


def replace_notes(lease: Path) -> None:
    """Let what was prepared be what tools have noted."""
    saving.replace(_parts(), lease)


def _parts() -> saving.Parts:
    return {notes.FOLDER: folders.current_owner()}
