"""KVM probe: boots our own kernel to see whether KVM works on this machine.

That /dev/kvm opens proves nothing: on some machines VMs and vCPUs can be made, and a guest then
hangs in its first second.
"""

import asyncio
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from etude.common import atomic
from etude.envserver.drivers.base import SandboxError
from etude.envserver.drivers.vm.jail import KVM, Jail
from etude.envserver.drivers.vm.qemu import boot
from etude.envserver.drivers.vm.qemu.command_line import Accelerator, QemuConfig
from etude.envserver.drivers.vm.qemu.compatibility import qemu_version
from etude.envserver.images.built_image import BuiltImage

BOOT_LIMIT_S = 3.0
"""With KVM the agent answers in half a second."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_MAX_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class KvmProbeResult:
    """Result of the probe."""

    works: bool
    why: str


async def probe_kvm(
    image: BuiltImage, machine: QemuConfig, *, jail: Jail, scratch: Path
) -> KvmProbeResult:
    """Probe this machine, VMM and kernel, or read the cached result in scratch."""
    facts = _dependencies(image, jail)
    path = scratch / "kvm.json"
    if (known := _load_cached(path, facts)) is not None:
        return known
    verdict = await _boot(image, replace(machine, accelerator=Accelerator.KVM), jail, scratch)
    row = {"facts": facts, "works": verdict.works, "why": verdict.why}
    atomic.write_text(path, json.dumps(row))
    return verdict


def _dependencies(image: BuiltImage, jail: Jail) -> dict[str, str]:
    """List what the result depends on."""
    return {
        "boot": _BOOT_ID.read_text(encoding="ascii").strip(),
        "monitor": qemu_version(),
        "kernel": image.files["vmlinuz"],
        "user": f"{jail.uid}:{jail.gid}",
        # The probe is repeated if the device appears later.
        "device": str(os.access(KVM, os.R_OK | os.W_OK)),
    }


async def _boot(
    image: BuiltImage, machine: QemuConfig, jail: Jail, scratch: Path
) -> KvmProbeResult:
    if not os.access(KVM, os.R_OK | os.W_OK):
        return KvmProbeResult(works=False, why=f"{KVM} cannot be opened")
    folder = Path(tempfile.mkdtemp(prefix="probe-", dir=scratch))
    try:
        booting = await boot.boot(image, machine, folder=folder, jail=jail)
    except SandboxError as error:
        return KvmProbeResult(works=False, why=str(error))
    try:
        return await _first_word(booting)
    finally:
        await booting.abandon()


async def _first_word(booting: boot.BootingVm) -> KvmProbeResult:
    try:
        with await booting.vm.agent() as agent:
            async with asyncio.timeout(BOOT_LIMIT_S):
                said = await asyncio.get_running_loop().sock_recv(agent, 1)
    except TimeoutError:
        return KvmProbeResult(works=False, why=f"the guest did not answer in {BOOT_LIMIT_S:g} s")
    except (OSError, SandboxError) as cause:
        return KvmProbeResult(works=False, why=str(cause))
    if not said:
        return KvmProbeResult(works=False, why="the VMM ended while the guest was booting")
    return KvmProbeResult(works=True, why="the guest answered")


def _load_cached(path: Path, facts: Mapping[str, str]) -> KvmProbeResult | None:
    try:
        with path.open("rb") as file:
            found = json.loads(file.read(_MAX_BYTES))
    except (OSError, ValueError):
        return None  # missing, or truncated by a crash: the probe is repeated
    match found:
        case {"facts": known, "works": bool(works), "why": str(why)} if known == facts:
            return KvmProbeResult(works=works, why=why)
        case _:
            return None
