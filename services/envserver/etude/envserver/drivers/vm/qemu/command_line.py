"""QEMU command line of a VM. Pure."""

from dataclasses import dataclass
from enum import StrEnum

from etude.envserver.drivers.vm.disk import DEFAULT_MIB

PROGRAM = "qemu-system-x86_64"
TRANSLATION_MIB = 32
"""Translation cache: the default takes 480 MiB a VM; 8 MiB make a first command 4 times as slow."""
SANDBOX = (
    "-sandbox",
    "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny",
)
CONSOLE = "con"
"""Chardev name of the guest's serial console."""
CONSOLE_BYTES = 4096
"""Size of a clone's console buffer; a power of two."""


class Accelerator(StrEnum):
    """Accelerator that runs the guest's instructions."""

    TCG = "tcg"
    KVM = "kvm"


@dataclass(frozen=True, slots=True, kw_only=True)
class QemuConfig:
    """Configuration that all clones of a template share."""

    memory_mib: int = 256
    disk_mib: int = DEFAULT_MIB
    """Disk for what the guest writes."""
    accelerator: Accelerator = Accelerator.TCG
    tsc_khz: int
    """Rate of the machine's time stamp counter, which the guest reads under TCG."""

    def __post_init__(self) -> None:
        if not 64 <= self.memory_mib <= 1 << 20:
            raise ValueError(f"memory_mib must be 64 to {1 << 20}, got {self.memory_mib}")
        if not 64 <= self.disk_mib <= 1 << 20:
            raise ValueError(f"disk_mib must be 64 to {1 << 20}, got {self.disk_mib}")
        if self.tsc_khz < 1:
            raise ValueError(f"tsc_khz must be positive, got {self.tsc_khz}")

    @property
    def memory_bytes(self) -> int:
        return self.memory_mib << 20

    @property
    def disk_bytes(self) -> int:
        return self.disk_mib << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class VmmFiles:
    """File descriptors that the VMM inherits, so that its user needs no path of the machine."""

    memory: int
    qmp: int
    agent: int
    root: int
    disk: int
    """Open for reading and writing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BootFiles:
    """File descriptors for the boot of a template."""

    kernel: int
    initramfs: int
    console: int
    """A connected socket for the kernel's console."""


def boot_arguments(machine: QemuConfig, wiring: VmmFiles, boot: BootFiles) -> tuple[str, ...]:
    """Arguments that boot a VM with shared memory."""
    words = (
        "console=ttyS0 panic=-1 reboot=t quiet"
        # Without it one boot of five hangs under TCG: "Fast TSC calibration failed".
        f" tsc_early_khz={machine.tsc_khz}"
    )
    if machine.accelerator is Accelerator.TCG:
        # Translated code is found again at the same address only: with random addresses each
        # command costs 50 CPU-ms instead of 17. A guest's own hardening is not our boundary. Nor
        # does it clear memory at allocation: see _processor.
        words += " norandmaps init_on_alloc=0"
    return (
        *_board(machine, wiring, is_shared=True),
        *("-kernel", _path(boot.kernel), "-initrd", _path(boot.initramfs), "-append", words),
        *("-chardev", f"socket,id={CONSOLE},fd={boot.console}"),
        *_devices(wiring),
    )


def clone_arguments(
    machine: QemuConfig, wiring: VmmFiles, *, translation_mib: int = TRANSLATION_MIB
) -> tuple[str, ...]:
    """Arguments of a VMM that waits, paused, for the state of a VM with copy-on-write memory."""
    return (
        *_board(machine, wiring, is_shared=False, translation_mib=translation_mib),
        # A delta records the state "running": only -S keeps it paused.
        *("-S", "-incoming", "defer"),
        *("-chardev", f"ringbuf,id={CONSOLE},size={CONSOLE_BYTES}"),
        *_devices(wiring),
    )


def _board(
    machine: QemuConfig,
    wiring: VmmFiles,
    *,
    is_shared: bool,
    translation_mib: int = TRANSLATION_MIB,
) -> tuple[str, ...]:
    share = "on" if is_shared else "off"
    memory = f"size={machine.memory_mib}M,mem-path={_path(wiring.memory)},share={share}"
    return (
        # ACPI stays on: Debian's kernel finds virtio devices of this board by no other way.
        *(
            "-M",
            "microvm,memory-backend=m0,suppress-vmdesc=on",
            *_processor(machine.accelerator, translation_mib),
        ),
        *("-m", str(machine.memory_mib), "-nodefaults", "-no-user-config"),
        *("-display", "none", "-no-reboot"),
        *("-object", f"memory-backend-file,id=m0,{memory}"),
    )


def _processor(accelerator: Accelerator, translation_mib: int) -> tuple[str, ...]:
    match accelerator:
        case Accelerator.TCG:
            # Without "enhanced" string operations, of which QEMU does one byte at a time: they were
            # a third of what a guest does for a read of 4 KiB.
            return ("-accel", f"tcg,tb-size={translation_mib}", "-cpu", "max,-erms")
        case Accelerator.KVM:
            return ("-accel", "kvm", "-cpu", "host")


def _devices(wiring: VmmFiles) -> tuple[str, ...]:
    return (
        *("-serial", f"chardev:{CONSOLE}"),
        *("-chardev", f"socket,id=qmp,fd={wiring.qmp},server=on,wait=off"),
        *("-mon", "chardev=qmp,mode=control"),
        *("-device", "virtio-serial-device,max_ports=2"),
        *("-chardev", f"socket,id=c0,fd={wiring.agent},server=on,wait=off"),
        *("-device", "virtserialport,nr=1,chardev=c0,name=agent.0"),
        *("-device", "virtio-rng-device"),
        *("-drive", f"id=d0,file={_path(wiring.root)},format=raw,if=none,readonly=on"),
        *("-device", "virtio-blk-device,drive=d0"),
        *_disk(wiring.disk),
    )


def _disk(descriptor: int) -> tuple[str, ...]:
    # Passed as an open file: the VMM's user may open no file of the host for writing. Unsafe: a
    # disk does not outlive its host, and a guest's fsync(2) need not wait for anything.
    drive = "id=d1,file=/dev/fdset/1,format=raw,if=none,cache=unsafe"
    return (
        *("-add-fd", f"fd={descriptor},set=1"),
        *("-drive", f"{drive},auto-read-only=off,file.locking=off"),
        # A full disk of the host is no error of the guest: the VM stops, and is ended.
        *("-device", "virtio-blk-device,drive=d1,werror=stop,rerror=stop"),
    )


def _path(descriptor: int) -> str:
    return f"/proc/self/fd/{descriptor}"
