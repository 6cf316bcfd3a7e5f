"""What a machine is, as Firecracker's API wants to be told."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from etude.envserver.drivers.firecracker.api import Body

KERNEL, INITRAMFS, ROOT = "vmlinux", "initramfs.gz", "root.sqsh"
MEMORY, STATE = "memory", "vmstate"
CHANNEL = "agent.sock"
"""Names in a machine's jail. A snapshot names the root and the channel by their paths."""

AGENT_PORT = 1024
"""Where the agent listens, as in services/envserver/guest/vsock.go."""
_GUEST_CID = 3
"""The first that is nobody's. Each process has guests of its own, so all have the same."""
_WORDS = (
    "quiet panic=-1 reboot=k pci=off i8042.noaux i8042.nomux i8042.dumbkbd"
    # What a guest says on a serial line would be written by its monitor, as fast as it likes.
    " 8250.nr_uarts=0 envroot=sqsh envchannel=vsock"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FireMachine:
    """What every clone of a template has in common with it."""

    memory_mib: int = 256

    @property
    def memory_bytes(self) -> int:
        """Size of the guest's memory."""
        return self.memory_mib << 20


class Put(NamedTuple):
    """One request."""

    path: str
    body: Body


def boot(machine: FireMachine) -> Iterator[Put]:
    """What makes a machine of a process that has just started, in this order."""
    yield Put(
        "/machine-config",
        {
            "vcpu_count": 1,
            "mem_size_mib": machine.memory_mib,
            "smt": False,
            "track_dirty_pages": False,
        },
    )
    yield Put(
        "/boot-source",
        {
            "kernel_image_path": f"/{KERNEL}",
            "initrd_path": f"/{INITRAMFS}",
            "boot_args": _WORDS,
        },
    )
    yield Put(
        "/drives/root",
        {
            "drive_id": "root",
            "path_on_host": f"/{ROOT}",
            # The first file system finds and mounts it, over a memory of its own.
            "is_root_device": False,
            "is_read_only": True,
        },
    )
    yield Put("/vsock", {"guest_cid": _GUEST_CID, "uds_path": f"/{CHANNEL}"})
    yield Put("/entropy", {})
    yield Put("/actions", {"action_type": "InstanceStart"})


PAUSE: Body = {"state": "Paused"}
RESUME: Body = {"state": "Resumed"}


def create(kind: str, *, state: str, memory: str) -> Put:
    """A snapshot of a paused machine: Full, or Diff since it was loaded or the one before."""
    return Put(
        "/snapshot/create",
        {"snapshot_type": kind, "snapshot_path": f"/{state}", "mem_file_path": f"/{memory}"},
    )


def load() -> Put:
    """A snapshot into a process that has just started; the machine stays paused."""
    return Put(
        "/snapshot/load",
        {
            "snapshot_path": f"/{STATE}",
            "mem_backend": {"backend_type": "File", "backend_path": f"/{MEMORY}"},
            "track_dirty_pages": True,
            "resume_vm": False,
        },
    )
