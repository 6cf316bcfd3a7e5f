"""Requests of Firecracker's API: VM configuration, pause and resume, snapshots."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from etude.envserver.drivers.vm.disk import DEFAULT_MIB
from etude.envserver.drivers.vm.firecracker.api_client import Body

KERNEL, INITRAMFS, ROOT = "vmlinux", "initramfs.gz", "root.sqsh"
DISK = "disk"
MEMORY, STATE = "memory", "vmstate"
CHANNEL = "agent.sock"
"""File names in a VM's jail. A snapshot names root, disk and channel by their paths."""

AGENT_PORT = 1024
"""The agent's vsock port, as in services/envserver/guest/vsock.go."""
_GUEST_CID = 3
"""The first free one. Each process has guests of its own, so all use the same."""
_WORDS = (
    "quiet panic=-1 reboot=k pci=off i8042.noaux i8042.nomux i8042.dumbkbd"
    # The VMM would write a serial console's output as fast as the guest likes.
    " 8250.nr_uarts=0 envchannel=vsock"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FirecrackerConfig:
    """Configuration that all clones of a template share."""

    memory_mib: int = 256
    disk_mib: int = DEFAULT_MIB
    """Disk for what the guest writes."""

    @property
    def memory_bytes(self) -> int:
        return self.memory_mib << 20

    @property
    def disk_bytes(self) -> int:
        return self.disk_mib << 20


class PutRequest(NamedTuple):
    """One PUT request."""

    path: str
    body: Body


def boot(machine: FirecrackerConfig) -> Iterator[PutRequest]:
    """Requests that configure and boot a VM, in order."""
    yield PutRequest(
        "/machine-config",
        {
            "vcpu_count": 1,
            "mem_size_mib": machine.memory_mib,
            "smt": False,
            "track_dirty_pages": False,
        },
    )
    yield PutRequest(
        "/boot-source",
        {
            "kernel_image_path": f"/{KERNEL}",
            "initrd_path": f"/{INITRAMFS}",
            "boot_args": _WORDS,
        },
    )
    yield PutRequest(
        "/drives/root",
        {
            "drive_id": "root",
            "path_on_host": f"/{ROOT}",
            # The initramfs finds and mounts it, under what the guest writes.
            "is_root_device": False,
            "is_read_only": True,
        },
    )
    yield PutRequest(
        "/drives/disk",
        {
            "drive_id": "disk",
            "path_on_host": f"/{DISK}",
            "is_root_device": False,
            "is_read_only": False,
            # A disk does not outlive its host: a guest's fsync(2) need not wait.
            "cache_type": "Unsafe",
        },
    )
    yield PutRequest("/vsock", {"guest_cid": _GUEST_CID, "uds_path": f"/{CHANNEL}"})
    yield PutRequest("/entropy", {})
    yield PutRequest("/actions", {"action_type": "InstanceStart"})


PAUSE: Body = {"state": "Paused"}
RESUME: Body = {"state": "Resumed"}


def create(kind: str, *, state: str, memory: str) -> PutRequest:
    """Request a snapshot of a paused VM: Full, or Diff since it was loaded or the one before."""
    return PutRequest(
        "/snapshot/create",
        {"snapshot_type": kind, "snapshot_path": f"/{state}", "mem_file_path": f"/{memory}"},
    )


def load() -> PutRequest:
    """Request to load a snapshot into a new process; the VM stays paused."""
    return PutRequest(
        "/snapshot/load",
        {
            "snapshot_path": f"/{STATE}",
            "mem_backend": {"backend_type": "File", "backend_path": f"/{MEMORY}"},
            "track_dirty_pages": True,
            "resume_vm": False,
        },
    )
