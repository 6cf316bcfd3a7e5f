"""Firecracker's programs: discovery, version, and compatibility key of snapshots."""

import hashlib
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

from etude.envserver.drivers.vm.errors import VmmError
from etude.envserver.drivers.vm.firecracker import api_requests, memory_files
from etude.envserver.drivers.vm.firecracker.api_requests import FirecrackerConfig
from etude.envserver.drivers.vm.firecracker.jail import FirecrackerPrograms
from etude.envserver.drivers.vm.host_cpu import processor_identity
from etude.envserver.drivers.vm.jail import KVM
from etude.envserver.images.built_image import BuiltImage

OLDEST = (1, 13)
"""First release that can track dirty pages after a load, by the field name used here."""
_LIMIT_S = 30.0


def compat_key(program: Path, machine: FirecrackerConfig, image: BuiltImage) -> str:
    """Digest of what a snapshot depends on: driver, VMM, VM, processor, kernel, initramfs, root."""
    puts = [[path, dict(body)] for path, body in api_requests.boot(machine)]
    files = [image.files[name] for name in ("vmlinuz", "initramfs.gz", "root.sqsh")]
    parts = ["firecracker", version(program), puts, machine.disk_mib, processor_identity(), files]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def version(program: Path) -> str:
    """Read the version of one of Firecracker's programs.

    Raises:
        VmmError: it has none, or is too old.
    """
    try:
        done = subprocess.run(
            (program, "--version"), capture_output=True, check=True, timeout=_LIMIT_S
        )
    except (OSError, subprocess.SubprocessError) as cause:
        raise VmmError(f"{program}: {cause}") from cause
    first = done.stdout.decode(errors="replace").partition("\n")[0].strip()
    found = re.search(r" v(\d{1,4})\.(\d{1,4})\.", f"{first}.")
    if found is None:
        raise VmmError(f"{program} --version says {first[:100]!r}")
    if (int(found[1]), int(found[2])) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise VmmError(f"{program} is {first[:100]!r}; this driver needs {oldest} or later")
    return first


def find_programs(scratch: Path, *, kvm: Path = KVM) -> FirecrackerPrograms:
    """Find Firecracker and its jailer; the boot of the first template shows that guests run.

    Raises:
        VmmError: a requirement is missing.
    """
    found = {name: shutil.which(name) for name in ("firecracker", "jailer")}
    match found:
        case {"firecracker": str(firecracker), "jailer": str(jailer)}:
            made = FirecrackerPrograms(
                firecracker=Path(firecracker).resolve(), jailer=Path(jailer).resolve()
            )
        case _:
            missing = " and ".join(name for name, path in found.items() if path is None)
            raise VmmError(f"{missing}: not on PATH")
    _check_same_release(version(made.firecracker), version(made.jailer))
    if not os.access(kvm, os.R_OK | os.W_OK):
        raise VmmError(f"{kvm} cannot be opened, and Firecracker needs it")
    if os.geteuid() != 0:
        raise VmmError("the jailer, which gives each VM its own user, needs root")
    if not memory_files.has_small_holes(scratch):
        raise VmmError(f"{scratch}: its file system has blocks larger than a page")
    return made


def _check_same_release(firecracker: str, jailer: str) -> None:
    """Check that jailer and Firecracker are of the same release, as its documents demand.

    Raises:
        VmmError: they are not.
    """
    if firecracker.rpartition(" ")[2] != jailer.rpartition(" ")[2]:
        raise VmmError(f"{firecracker!r} and {jailer!r} are not of the same release")
