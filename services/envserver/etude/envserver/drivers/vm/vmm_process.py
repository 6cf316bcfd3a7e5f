"""Process of a VMM: the half that QEMU and Firecracker VMs share."""

import asyncio
import contextlib
import os
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import override

from etude.envserver.drivers.process_identity import EXIT_LIMIT_S, ProcessId, open_pidfd
from etude.envserver.drivers.vm import vm_record
from etude.envserver.drivers.vm.errors import VmmError
from etude.envserver.drivers.vm.interface import Vmm
from etude.envserver.drivers.vm.vm_record import VmRecord

_STDERR_BYTES = 2_000


@dataclass(slots=True, kw_only=True)
class VmmProcess(Vmm):
    """A running VMM. Its folder is private to the host and removed with it."""

    folder: Path
    pid: int
    pidfd: int
    exited: "asyncio.Future[int | None]"
    """Exit code, negative for a signal; None for a process that is not our child."""

    @property
    @override
    def disk_folder(self) -> Path:
        return self.folder

    @override
    async def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            if not self.exited.done():
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        await asyncio.wait([self.exited], timeout=EXIT_LIMIT_S)

    @override
    async def destroy(self) -> None:
        await self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def save_record(self, process: ProcessId | None, *, uid: int, template: str) -> None:
        """Record the process before the guest runs, so that a successor finds it.

        Raises:
            VmmError: the record cannot be written.
        """
        if process is None:
            return  # it has ended already, which connecting to it reports
        noted = VmRecord(process=process, uid=uid, template=template)
        try:
            vm_record.save(self.folder, noted, is_durable=False)
        except OSError as cause:
            raise VmmError(f"record of VM {self.pid} cannot be written: {cause}") from cause


def is_paused(state: object) -> bool:
    """Tell whether a VM is paused, by its VMM's answer.

    Raises:
        VmmError: it is in a state that cannot be resumed.
    """
    if str(state).lower() not in {"running", "paused"}:
        raise VmmError(f"the VM is {str(state)[:100]}, and cannot be resumed")
    return str(state).lower() == "paused"


def pidfd_of(process: ProcessId) -> int:
    """Open a pidfd of a VMM that an earlier process started.

    Raises:
        VmmError: it has ended.
    """
    pidfd = open_pidfd(process)
    if pidfd is None:
        raise VmmError(f"VM {process.pid} has ended")
    return pidfd


def last_output(folder: Path) -> str:
    """Read the start of a VMM's standard error."""
    try:
        with (folder / "stderr").open("rb") as file:
            return file.read(_STDERR_BYTES).decode(errors="replace").strip()
    except OSError:
        return ""


def vmm_uid(uid: int) -> int:
    """User of a VMM that is started for a user: this process's own unless it is root."""
    return uid if os.geteuid() == 0 else os.geteuid()
