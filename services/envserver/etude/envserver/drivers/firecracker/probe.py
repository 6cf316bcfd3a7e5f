"""Whether Firecracker can run here, as far as that shows before a guest has booted."""

import os
import shutil
from pathlib import Path

from etude.envserver.drivers.firecracker import memory
from etude.envserver.drivers.firecracker.compatibility import version
from etude.envserver.drivers.firecracker.jail import Programs
from etude.envserver.drivers.machines.errors import VmmError
from etude.envserver.drivers.machines.jail import KVM


def programs(scratch: Path, *, kvm: Path = KVM) -> Programs:
    """Firecracker and its jailer. That a guest runs, the boot of the first template shows.

    Args:
        scratch: where machines will have their files.
        kvm: the device of the processor's virtual machines.

    Raises:
        VmmError: what is missing.
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
        raise VmmError(f"{kvm} cannot be opened, and Firecracker runs nothing without")
    if os.geteuid() != 0:
        raise VmmError("the jailer, which makes each machine a user of its own, needs root")
    if not memory.has_small_holes(scratch):
        raise VmmError(f"{scratch}: its file system has blocks larger than a page")
    return made


def _check_same(firecracker: str, jailer: str) -> None:
    """A jailer is for a Firecracker of its own release, as its documents say.

    Raises:
        VmmError: it is of another.
    """
    if firecracker.rpartition(" ")[2] != jailer.rpartition(" ")[2]:
        raise VmmError(f"{firecracker!r} and {jailer!r} are not of the same release")
