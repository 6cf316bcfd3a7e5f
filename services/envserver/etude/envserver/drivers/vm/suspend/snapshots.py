"""Snapshots of leases' VMs, and leases that start from a snapshot.

A snapshot has the format of a suspended VM: a file from which the VM is restored at the next call,
and its disk next to it. So a fork is two hard links, and costs nothing until then.
"""

import asyncio
import os
from pathlib import Path

from etude.envserver.drivers import folder_snapshots
from etude.envserver.drivers.base import SavedSandbox
from etude.envserver.drivers.vm import delta_file, disk
from etude.envserver.drivers.vm.errors import IntegrityError
from etude.envserver.drivers.vm.suspend.auto_suspend import AutoSuspendingVm
from etude.envserver.drivers.vm.suspend.idle_policy import PowerState
from etude.envserver.drivers.vm.suspend.lease_vm import SuspendStore, suspended_file
from etude.envserver.storage.folders import FolderLimits

DELTA = "delta"
_PARTIAL = "restored.partial"


async def save(
    guest: AutoSuspendingVm, lease: Path, target: Path, limits: FolderLimits
) -> SavedSandbox:
    """Save a VM and its tools' notes to an empty folder; it continues.

    Raises:
        TooLargeError: the limits are exceeded.
    """
    path, sleeps = target / DELTA, suspended_file(lease)
    if guest.state is PowerState.SAVED and sleeps is not None:
        await asyncio.to_thread(_link, sleeps, path)
    else:
        async with guest.keep_running():
            await guest.vm.copy(path, max_bytes=limits.max_bytes)
    num_bytes = path.stat().st_size + _disk_bytes(path)
    main = SavedSandbox(num_bytes=num_bytes, digest=delta_file.digest(path))
    return await asyncio.to_thread(folder_snapshots.save_notes, main, lease, target, limits)


def check(source: Path, saved: SavedSandbox, store: SuspendStore, template: str) -> None:
    """Check that a file is the snapshot that was saved, and can be restored. Call it on a thread.

    Raises:
        IntegrityError: it is not, or cannot be restored.
    """
    path = source / DELTA
    delta_file.load(path, key=store.key, template=template, verified=store.verified).close()
    if delta_file.digest(path) != folder_snapshots.main_digest(saved):
        raise IntegrityError(f"{source}: is another snapshot than the requested one")


def prepare(source: Path, saved: SavedSandbox, lease: Path) -> None:
    """Copy a snapshot into a lease's folder; activate() and replace_notes() do the rest.

    Raises:
        CorruptError: the notes are not those that were saved.
    """
    folder_snapshots.prepare_notes(source, lease, saved)
    partial = lease / _PARTIAL
    partial.unlink(missing_ok=True)
    _link(source / DELTA, partial)


def activate(lease: Path, generation: int) -> None:
    """Make the prepared VM the lease's, suspended."""
    target = suspended_file(lease) or lease / f"asleep.{generation}"
    (lease / _PARTIAL).rename(target)
    disk.remove_kept(lease, but=delta_file.disk_digest(target))


def _link(source: Path, target: Path) -> None:
    """Give a saved VM, memory and disk, a second name in another folder."""
    disk.link_kept(source.parent, target.parent, delta_file.disk_digest(source))
    os.link(source, target)


def _disk_bytes(path: Path) -> int:
    """Bytes that the disk of a saved VM takes."""
    return 512 * disk.kept_path(path.parent, delta_file.disk_digest(path)).stat().st_blocks
