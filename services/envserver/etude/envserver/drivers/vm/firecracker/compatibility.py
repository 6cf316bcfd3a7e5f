"""Firecracker's programs: discovery, version, and compatibility key of snapshots."""

import hashlib
import json
import re
import subprocess
from pathlib import Path

from etude.envserver.drivers.firecracker import bodies
from etude.envserver.drivers.firecracker.bodies import FireMachine
from etude.envserver.drivers.machines.errors import VmmError
from etude.envserver.drivers.machines.processor import host_processor
from etude.envserver.images.built_image import Image

OLDEST = (1, 13)
"""First release that can track dirty pages after a load, by the field name used here."""
_LIMIT_S = 30.0


def compat_key(program: Path, machine: FireMachine, image: Image) -> str:
    """Digest of what a snapshot depends on: driver, VMM, VM, processor, kernel, initramfs, root.

    Raises:
        VmmError: there is no VMM.
    """
    puts = [[path, dict(body)] for path, body in bodies.boot(machine)]
    files = [image.files[name] for name in ("vmlinuz", "initramfs.gz", "root.sqsh")]
    parts = ["firecracker", version(program), puts, host_processor(), files]
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
