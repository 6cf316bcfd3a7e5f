"""Compatibility key of QEMU snapshots: they are restored only where all of it is the same."""

import functools
import hashlib
import json
import re
import subprocess

from etude.envserver.drivers.vm.errors import VmmError
from etude.envserver.drivers.vm.host_cpu import processor_identity
from etude.envserver.drivers.vm.qemu import command_line as machines
from etude.envserver.drivers.vm.qemu.command_line import (
    Accelerator,
    BootFiles,
    QemuConfig,
    VmmFiles,
)
from etude.envserver.images.built_image import BuiltImage

_VERSION_LIMIT_S = 30.0


def compat_key(machine: QemuConfig, image: BuiltImage) -> str:
    """Digest of what a snapshot depends on: driver, VMM, VM, processor, kernel, initramfs, root."""
    wiring = VmmFiles(memory=0, qmp=0, agent=0, root=0, disk=0)
    arguments = machines.boot_arguments(
        machine, wiring, BootFiles(kernel=0, initramfs=0, console=0)
    )
    parts = ["qemu", qemu_version(), arguments, machine.disk_mib, _processor(machine)]
    files = [image.files[name] for name in ("vmlinuz", "initramfs.gz", "root.sqsh")]
    return hashlib.sha256(json.dumps([*parts, files]).encode()).hexdigest()


@functools.cache
def qemu_version() -> str:
    """Read QEMU's version, with the distribution's revision.

    Raises:
        VmmError: there is none.
    """
    try:
        words = (machines.PROGRAM, "--version")
        done = subprocess.run(words, capture_output=True, check=True, timeout=_VERSION_LIMIT_S)
    except (OSError, subprocess.SubprocessError) as cause:
        raise VmmError(f"{machines.PROGRAM}: {cause}") from cause
    first = done.stdout.decode(errors="replace").partition("\n")[0]
    if not re.search(r"\d+\.\d+", first):
        raise VmmError(f"{machines.PROGRAM} --version says {first[:100]!r}")
    return first


def _processor(machine: QemuConfig) -> list[str]:
    match machine.accelerator:
        case Accelerator.TCG:
            return [str(machine.tsc_khz)]
        case Accelerator.KVM:
            return processor_identity()
