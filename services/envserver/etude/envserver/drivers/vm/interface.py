"""Interface of the microVM drivers: VMM process, saved state (delta), template."""

import asyncio
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol, TypeVar

from etude.envserver.drivers.process_identity import ProcessId
from etude.envserver.drivers.vm.disk import used_bytes
from etude.envserver.drivers.vm.errors import VmmError
from etude.envserver.drivers.vm.jail import Jail

if TYPE_CHECKING:  # it loads numpy, and a node's daemon starts without
    from etude.envserver.drivers.vm.dirty_pages import PageBuffer

_M = TypeVar("_M", bound="Vmm")


class Vmm(Protocol):
    """The VMM process of one VM. Its folder is private to the host and removed with it.

    Every method raises VmmError if the process has died, hangs, or refuses the command.
    """

    keeps_channel: ClassVar[bool]
    """Whether the connection to the guest's agent survives a snapshot."""
    folder: Path
    pid: int
    exited: "asyncio.Future[int | None]"
    """Exit code, negative for a signal; None for a process that is not our child."""

    @property
    def disk_folder(self) -> Path:
        """Folder that its disk is in."""
        ...

    async def agent(self) -> socket.socket:
        """Connect to the guest's agent, non-blocking; there is one connection at a time."""

    async def is_stopped(self) -> bool:
        """Tell whether the VM is frozen.

        Raises:
            VmmError: it is in a state that cannot be resumed.
        """

    async def freeze(self) -> None:
        """Stop the guest's processor: the VM uses no CPU time."""

    async def thaw(self) -> None:
        """Let the guest run, for the first time too."""

    async def console(self) -> str:
        """Read the end of the guest's console; empty where there is none."""

    async def kill(self) -> None:
        """Kill the process; its folder stays as a trace. Safe to repeat."""

    async def destroy(self) -> None:
        """Kill the process and remove its folder; safe to repeat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VmDelta:
    """Saved state of one VM, as the difference to its template. It owns its file descriptors."""

    template: str
    """Address of its template."""
    is_full: bool
    """Whether it holds all memory, where a difference is not possible."""
    stream: int
    """Immutable file."""
    disk: int
    """The VM's disk of that moment, immutable."""
    offset: int = 0
    """Offset of the state in the file."""
    changed_bytes: int
    """Changed bytes of the guest's memory."""
    pause_s: float = 0.0
    """Time the guest was frozen for it."""
    digest: str = ""
    """Digest of the stored file; empty before it is stored."""

    @property
    def num_bytes(self) -> int:
        """Bytes that it takes, with the disk."""
        return os.fstat(self.stream).st_size - self.offset + used_bytes(self.disk)

    def close(self) -> None:
        """Close the files."""
        os.close(self.stream)
        os.close(self.disk)


class VmTemplate(Protocol):
    """Frozen state of a booted VM, from which clones are made. Methods raise VmmError."""

    @property
    def address(self) -> str:
        """Digest of memory, devices and compat_key, by which deltas name their template."""

    @property
    def compat_key(self) -> str:
        """Digest of all that its clones run on."""

    @property
    def memory_bytes(self) -> int:
        """Memory that it takes while it is open."""
        return 0

    async def spawn(self, folder: Path, jail: Jail) -> Vmm:
        """Start a VMM that waits for the template's state or a delta of it."""

    async def restore(self, shell: Vmm, saved: VmDelta | None) -> None:
        """Restore the template's or a saved state in an idle VMM, frozen; destroy it on failure."""

    async def save(
        self, vm: Vmm, buffer: "PageBuffer", *, keep_running: bool, disk: Path
    ) -> VmDelta:
        """Save a clone of this template; it stays frozen unless `keep_running`.

        The caller has brought its channel to a boundary between two frames.

        Args:
            vm: the clone.
            buffer: a buffer for its pages.
            keep_running: whether it goes on; a VM that does not is destroyed by the caller.
            disk: path for its disk of that moment, on the same file system.
        """

    async def adopt(self, folder: Path, process: ProcessId) -> Vmm:
        """Adopt a VMM that an earlier process of this host started.

        Raises:
            VmmError: it has ended or does not answer; then it is killed, and its folder stays.
        """

    def close(self) -> None:
        """Close its files; running VMs keep theirs."""


def downcast(monitor: Vmm, kind: type[_M]) -> _M:
    """Downcast a VMM to one driver's kind.

    Raises:
        VmmError: it belongs to another driver.
    """
    if not isinstance(monitor, kind):
        raise VmmError(f"VM {monitor.pid} belongs to another driver")
    return monitor
