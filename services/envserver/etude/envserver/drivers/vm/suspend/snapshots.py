"""Snapshots of leases' VMs, and leases that start from a snapshot.

A snapshot has the format of a suspended VM: a file from which the VM is restored at the next call.
So a fork is a hard link to the file, and costs nothing until then.
"""

import asyncio
import os
from pathlib import Path

from etude.agent.workspace import notes
from etude.envserver.drivers import folder_snapshots
from etude.envserver.drivers.base import SavedSandbox
from etude.envserver.drivers.vm import delta_file
from etude.envserver.drivers.vm.errors import IntegrityError
from etude.envserver.drivers.vm.suspend.auto_suspend import AutoSuspendingVm
from etude.envserver.drivers.vm.suspend.idle_policy import PowerState
from etude.envserver.drivers.vm.suspend.lease_vm import SuspendStore, suspended_file
from etude.envserver.storage import folders
from etude.envserver.storage.folders import FolderLimits, TooLargeError

DELTA = "delta"
_PARTIAL = "restored.partial"
_CODE_DIGITS = 64
"""Length of the VM's part of a digest; that of the tools' notes follows."""


async def save(
    guest: AutoSuspendingVm, lease: Path, target: Path, limits: FolderLimits
) -> SavedSandbox:
    """Save a VM and its tools' notes to an empty folder; it continues.

    Raises:
        TooLargeError: the limits are exceeded.
        SandboxError: the VM failed.
        OSError: a file cannot be written.
    """
    path, sleeps = target / DELTA, suspended_file(lease)
    if guest.state is PowerState.SAVED and sleeps is not None:
        os.link(sleeps, path)
    else:
        async with guest.keep_running():
            await guest.vm.copy(path, max_bytes=limits.max_bytes)
    left = limits.max_bytes - path.stat().st_size
    if left < 0:
        raise TooLargeError(f"the VM takes {path.stat().st_size} bytes")
    rest = limits._replace(max_bytes=left)
    noted = await asyncio.to_thread(folder_snapshots.save, lease, _parts(), target, rest)
    return SavedSandbox(
        num_bytes=path.stat().st_size + noted.num_bytes,
        digest=delta_file.digest(path) + noted.digest,
    )


def check(source: Path, saved: SavedSandbox, bed: SuspendStore, template: str) -> None:
    """Check that a file is the snapshot that was saved, and can be restored. Call it on a thread.

    Raises:
        IntegrityError: it is not, or cannot be restored.
        OSError: it cannot be read.
    """
    path = source / DELTA
    delta_file.load(path, key=bed.key, template=template, proven=bed.verified).close()
    if delta_file.digest(path) != saved.digest[:_CODE_DIGITS]:
        raise IntegrityError(f"{source}: is another snapshot than the requested one")


def prepare(source: Path, saved: SavedSandbox, lease: Path) -> None:
    """Copy a snapshot into a lease's folder; put() and replace_notes() activate it.

    Raises:
        CorruptError: the notes are not those that were saved.
        OSError: something cannot be read or written.
    """
    noted = SavedSandbox(num_bytes=0, digest=saved.digest[_CODE_DIGITS:])
    folder_snapshots.prepare(source, _parts(), lease, noted)
    partial = lease / _PARTIAL
    partial.unlink(missing_ok=True)
    os.link(source / DELTA, partial)


def activate(lease: Path, generation: int) -> None:
    """Make the prepared VM the lease's, suspended."""
    present = suspended_file(lease)
    (lease / _PARTIAL).rename(present or lease / f"asleep.{generation}")


def replace_notes(lease: Path) -> None:
    """Make the prepared notes the lease's."""
    folder_snapshots.replace(_parts(), lease)


def _parts() -> folder_snapshots.FolderOwners:
    return {notes.FOLDER: folders.current_owner()}
