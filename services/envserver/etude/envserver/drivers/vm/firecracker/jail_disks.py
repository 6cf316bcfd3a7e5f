"""Disks of VMs in their jails: copies of the template's or of a saved one."""

import os
from pathlib import Path

from etude.envserver.drivers.vm import disk
from etude.envserver.drivers.vm.firecracker import jail
from etude.envserver.drivers.vm.firecracker.api_requests import DISK, FirecrackerConfig
from etude.envserver.drivers.vm.firecracker.jail import FirecrackerJail
from etude.envserver.drivers.vm.interface import VmDelta


def format_disk(cell: FirecrackerJail, machine: FirecrackerConfig) -> None:
    """Put an empty disk into the chroot of a VM that boots."""
    os.close(disk.create_formatted(cell.root, machine.disk_bytes))
    _give_disk(cell)


def add_disk(cell: FirecrackerJail, template: Path, saved: VmDelta | None) -> None:
    """Put a copy of the template's disk, or of the saved one, into the chroot."""
    source = disk.open_disk(template / DISK) if saved is None else os.dup(saved.disk)
    try:
        os.close(disk.copy_open(source, cell.root / DISK))
    finally:
        os.close(source)
    _give_disk(cell)


def copy_disk(cell: FirecrackerJail, machine: FirecrackerConfig, target: Path) -> int:
    """Copy the disk of a paused VM; returns the copy, open."""
    source = jail.open_file(cell, DISK, size_bytes=machine.disk_bytes)
    try:
        return disk.copy_open(source, target)
    finally:
        os.close(source)


def disk_digest(template: Path) -> bytes:
    """Compute the digest of a template's disk."""
    descriptor = disk.open_disk(template / DISK)
    try:
        return disk.digest(descriptor)
    finally:
        os.close(descriptor)


def _give_disk(cell: FirecrackerJail) -> None:
    """Let the VM's user, the owner of the chroot, write to the disk."""
    owner = cell.root.stat()
    os.chown(cell.root / DISK, owner.st_uid, owner.st_gid, follow_symlinks=False)
