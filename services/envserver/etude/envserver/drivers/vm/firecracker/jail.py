"""Jail of one VM: the jailer's command line, files in its chroot, its control groups.

The jailer makes the chroot's folder and gives it to the VM's user, so a compromised VMM can put
anything there: files are checked before use, and no link is followed.
"""

import contextlib
import os
import shutil
import socket
import stat
from dataclasses import dataclass
from pathlib import Path

from etude.envserver.drivers.vm.errors import VmmError
from etude.envserver.drivers.vm.firecracker.api_requests import FirecrackerConfig

API = "api.sock"
_MAX_FILES = 256
"""Limit of one process: files, sockets, and some descriptors for each device."""
_MAX_TASKS = 32
"""One process has a thread for the API, one for devices, one for each vCPU."""
_OWN_BYTES = 64 << 20
"""Memory on top of the guest's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirecrackerPrograms:
    """Firecracker and its jailer, of the same release."""

    firecracker: Path
    jailer: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class FirecrackerJail:
    """Jail of one VM: its programs, folder and id."""

    programs: FirecrackerPrograms
    folder: Path
    """Folder of the VM; private to the host."""
    vm_id: str
    """Letters, digits and hyphens, 64 at most."""

    @property
    def root(self) -> Path:
        return self.folder / "jail" / self.programs.firecracker.name / self.vm_id / "root"

    @property
    def pid_file(self) -> Path:
        """File in which the jailer writes the VMM's PID."""
        return self.root / f"{self.programs.firecracker.name}.pid"


def command(
    cell: FirecrackerJail, machine: FirecrackerConfig, *, uid: int, gid: int, netns: str
) -> tuple[str, ...]:
    """Command line that starts a VMM in its jail, with the jailer's default seccomp filter."""
    size = max(machine.memory_bytes + _OWN_BYTES, machine.disk_bytes)
    limits = (f"fsize={size}", f"no-file={_MAX_FILES}")
    groups = (f"memory.max={2 * machine.memory_bytes + _OWN_BYTES}", f"pids.max={_MAX_TASKS}")
    return (
        *(str(cell.programs.jailer), "--id", cell.vm_id),
        *("--exec-file", str(cell.programs.firecracker)),
        *("--uid", str(uid), "--gid", str(gid)),
        *("--cgroup-version", "2"),
        *(word for each in groups for word in ("--cgroup", each)),
        *("--chroot-base-dir", str(cell.folder / "jail")),
        *("--netns", netns),
        *(word for each in limits for word in ("--resource-limit", each)),
        "--new-pid-ns",
        *("--", "--api-sock", f"/{API}", "--level", "Error"),
    )


def find_jail(folder: Path, programs: FirecrackerPrograms) -> FirecrackerJail:
    """Find the jail of a VM that was started in this folder.

    Raises:
        VmmError: there is none.
    """
    try:
        (found,) = (folder / "jail" / programs.firecracker.name).iterdir()
    except (OSError, ValueError) as cause:
        raise VmmError(f"{folder}: has no jail of a VMM") from cause
    return FirecrackerJail(programs=programs, folder=folder, vm_id=found.name)


def add_file(cell: FirecrackerJail, name: str, source: Path) -> None:
    """Put an immutable file into the chroot: a hard link, or a copy."""
    target = cell.root / name
    try:
        os.link(source, target)
    except OSError:  # another file system, or the limit of links
        shutil.copyfile(source, target)
        target.chmod(0o444)


def open_file(cell: FirecrackerJail, name: str, *, size_bytes: int | None = None) -> int:
    """Open a file that the VMM has written, for reading.

    Raises:
        VmmError: there is none, or it is not a regular file of that size.
    """
    try:
        descriptor = os.open(cell.root / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as cause:
        raise VmmError(f"{cell.root / name}: {cause}") from cause
    found = os.fstat(descriptor)
    is_fitting = size_bytes is None or found.st_size == size_bytes
    if not stat.S_ISREG(found.st_mode) or not is_fitting:
        os.close(descriptor)
        raise VmmError(f"{cell.root / name}: is not a regular file of the expected size")
    return descriptor


def dial(cell: FirecrackerJail, name: str) -> socket.socket:
    """Connect to a socket of the VMM, non-blocking.

    Raises:
        VmmError: there is none.
    """
    try:
        at = os.open(cell.root / name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as cause:
        raise VmmError(f"{cell.root / name}: {cause}") from cause
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        # The name of an open file is short, cannot be replaced meanwhile, and is not a link:
        # connecting to an open link, or to a file that is not a socket, fails.
        connection.connect(f"/proc/self/fd/{at}")
    except OSError as cause:
        connection.close()
        raise VmmError(f"{cell.root / name}: {cause}") from cause
    finally:
        os.close(at)
    return connection


CGROUP_ROOT = Path("/sys/fs/cgroup")


def remove_cgroups(name: str, prefix: str, *, root: Path = CGROUP_ROOT) -> None:
    """Remove the control groups of VMs that have ended; the kernel keeps the others."""
    with contextlib.suppress(OSError):
        for group in (root / name).glob(f"{prefix}*"):
            with contextlib.suppress(OSError):
                group.rmdir()
