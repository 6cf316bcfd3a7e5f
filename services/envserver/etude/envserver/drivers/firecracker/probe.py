"""Probe of Firecracker on this machine."""

import os
import shutil
from pathlib import Path

from etude.envserver.drivers.firecracker import memory
from etude.envserver.drivers.firecracker.compatibility import version
from etude.envserver.drivers.firecracker.jail import Programs
from etude.envserver.drivers.machines.errors import VmmError
from etude.envserver.drivers.machines.jail import KVM


def programs(scratch: Path, *, kvm: Path = KVM) -> Programs:
    """Find Firecracker and its jailer; the boot of the first template shows that guests run.

    Args:
        scratch: folder for files of VMs.
        kvm: the KVM device.

    Raises:
        VmmError: a requirement is missing.
    """
    found = {name: shutil.which(name) for name in ("firecracker", "jailer")}
    match found:
        case {"firecracker": str(firecracker), "jailer": str(jailer)}:
            made = Programs(firecracker=Path(firecracker).resolve(), jailer=Path(jailer).resolve())
        case _:
            missing = " and ".join(name for name, path in found.items() if path is None)
            raise VmmError(f"{missing}: not on PATH")
    _check_same(version(made.firecracker), version(made.jailer))
    if not os.access(kvm, os.R_OK | os.W_OK):
        raise VmmError(f"{kvm} cannot be opened, and Firecracker needs it")
    if os.geteuid() != 0:
        raise VmmError("the jailer, which gives each VM its own user, needs root")
    if not memory.has_small_holes(scratch):
        raise VmmError(f"{scratch}: its file system has blocks larger than a page")
    return made


def _check_same(firecracker: str, jailer: str) -> None:
    """Check that jailer and Firecracker are of the same release, as its documents demand.

    Raises:
        VmmError: they are not.
    """
    if firecracker.rpartition(" ")[2] != jailer.rpartition(" ")[2]:
        raise VmmError(f"{firecracker!r} and {jailer!r} are not of the same release")
