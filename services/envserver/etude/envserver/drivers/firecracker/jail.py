"""The jail of one machine: how Firecracker's jailer is called, and what lies in its chroot.

The jailer makes the chroot's folder and gives it to the machine's user, so a monitor that was taken
over can put what it likes there: whatever is opened here is looked at first, and no link followed.
"""

import os
import shutil
import socket
import stat
from dataclasses import dataclass
from pathlib import Path

from etude.envserver.drivers.firecracker.bodies import FireMachine
from etude.envserver.drivers.machines.errors import VmmError

API = "api.sock"
_MAX_FILES = 256
"""Of one process: files, sockets, and some descriptors for every device."""
_MAX_TASKS = 32
"""The same process has a thread for the API, one for devices, one for each processor."""
_OWN_BYTES = 64 << 20
"""Beside the guest's memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Programs:
    """Firecracker and its jailer, of the same release."""

    firecracker: Path
    jailer: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One machine's place: its id, its folder at the node, its user."""

    programs: Programs
    folder: Path
    """Of the machine; private to the node."""
    vm_id: str
    """Letters, digits and hyphens, 64 at most."""

    @property
    def root(self) -> Path:
        """What the monitor sees as `/`."""
        return self.folder / "jail" / self.programs.firecracker.name / self.vm_id / "root"

    @property
    def pid_file(self) -> Path:
        """Where the jailer writes which process became the monitor."""
        return self.root / f"{self.programs.firecracker.name}.pid"


def command(cell: Cell, machine: FireMachine, *, uid: int, gid: int, netns: str) -> tuple[str, ...]:
    """How a monitor is started in its jail; the jailer keeps its default filter of system calls.

    Args:
        cell: its place.
        machine: what it will run.
        uid: whom it runs as: nobody else does.
        gid: the same.
        netns: a file of a network namespace with nothing in it.
    """
    limits = (f"fsize={machine.memory_bytes + _OWN_BYTES}", f"no-file={_MAX_FILES}")
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


def cell_of(folder: Path, programs: Programs) -> Cell:
    """The place of a machine that was started in this folder.

    Raises:
        VmmError: none was.
    """
    try:
        (found,) = (folder / "jail" / programs.firecracker.name).iterdir()
    except (OSError, ValueError) as cause:
        raise VmmError(f"{folder}: no monitor was started there") from cause
    return Cell(programs=programs, folder=folder, vm_id=found.name)


def place(cell: Cell, name: str, source: Path) -> None:
    """Put a file into the chroot that nobody changes: as a second name of it, or as a copy.

    Raises:
        OSError: it cannot be put there.
    """
    target = cell.root / name
    try:
        os.link(source, target)
    except OSError:  # another file system, or a limit of links
        shutil.copyfile(source, target)
        target.chmod(0o444)


def opened(cell: Cell, name: str, *, size_bytes: int | None = None) -> int:
    """A file that the monitor has written, open for reading.

    Raises:
        VmmError: there is none, or it is no regular file of that size.
    """
    try:
        descriptor = os.open(cell.root / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as cause:
        raise VmmError(f"{cell.root / name}: {cause}") from cause
    found = os.fstat(descriptor)
    is_fitting = size_bytes is None or found.st_size == size_bytes
    if not stat.S_ISREG(found.st_mode) or not is_fitting:
        os.close(descriptor)
        raise VmmError(f"{cell.root / name}: is no file of the size that it has to have")
    return descriptor


def dial(cell: Cell, name: str) -> socket.socket:
    """A connection to a socket of the monitor's, not blocking.

    Raises:
        VmmError: there is none.
    """
    try:
        at = os.open(cell.root / name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as cause:
        raise VmmError(f"{cell.root / name}: {cause}") from cause
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        # The name of an open file: short, not what somebody puts there meanwhile, and no link: to
        # the file of a link, or to one that is no socket, nothing can be connected.
        connection.connect(f"/proc/self/fd/{at}")
    except OSError as cause:
        connection.close()
        raise VmmError(f"{cell.root / name}: {cause}") from cause
    finally:
        os.close(at)
    return connection
