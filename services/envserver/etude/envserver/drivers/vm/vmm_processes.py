"""Discovery of this host's VMM processes, and the reaper of orphans.

VMMs are known from records on disk and from marks in /proc. Only processes below this host's own
scratch folder, in its own mount namespace, are ever ended: several hosts may share a machine.
"""

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from select import POLLIN, poll

from etude.common.errors import CorruptError
from etude.envserver.drivers import process_identity
from etude.envserver.drivers.process_identity import EXIT_LIMIT_S, MARK, ProcessId
from etude.envserver.drivers.vm import vm_record
from etude.envserver.drivers.vm.vm_record import VmRecord

VM_FOLDER = "machine"
"""Name of the VM folder in a lease's folder."""
SUSPENDED = "asleep.*"
"""Glob of a suspended VM's file in a lease's folder."""
_BRIEF = ("boot-*", "probe-*")
"""Globs of folders of VMs that serve no lease."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class VmFolders:
    """Folders of a host's VMs."""

    scratch: Path

    @property
    def leases(self) -> Path:
        """Parent of the lease folders, each with at most one VM in it."""
        return self.scratch / "leases"

    @property
    def warm_pool(self) -> Path:
        """Parent of the warm pools' VM folders."""
        return self.scratch / "stock"

    def find_processes(self) -> dict[ProcessId, Path]:
        """Find every VMM process that was started here, with the VM folder it was started for."""
        return find_marked_processes(self.scratch)

    def folders(self) -> list[Path]:
        """List every VM folder.

        Leases come last, so that a VM which moves to a lease meanwhile is not missed.
        """
        others = [each for name in _BRIEF for each in sorted(self.scratch.glob(name))]
        stock = list(_subfolders(self.warm_pool))
        leased = [folder / VM_FOLDER for folder in _subfolders(self.leases)]
        return [*others, *stock, *(folder for folder in leased if folder.is_dir())]


def load_records(places: VmFolders) -> dict[Path, VmRecord]:
    """Read all readable records, by VM folder."""
    found = {}
    for folder in places.folders():
        with contextlib.suppress(CorruptError):
            noted = vm_record.load(folder)
            if noted is not None:
                found[folder] = noted
    return found


def find_marked_processes(scratch: Path) -> dict[ProcessId, Path]:
    """Find every VMM process that was started below a folder, and the VM folder of each."""
    prefix = f"{MARK}={scratch.resolve()}{os.sep}".encode()
    view = _mount_namespace("self")
    found = {}
    for entry in os.scandir("/proc"):
        name = entry.name
        mark = _mark(name, prefix) if name.isdecimal() else None
        process = (
            process_identity.identify(int(name))
            if mark and _mount_namespace(name) == view
            else None
        )
        if process is not None and mark is not None:
            found[process] = mark
    return found


def age_s(process: ProcessId) -> float:
    """Age of a process in seconds."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - process.started / _TICKS_PER_S


def kill_processes(processes: Iterable[ProcessId]) -> int:
    """Kill processes and wait for their exit; returns how many there were."""
    with contextlib.ExitStack() as opened:
        handles = []
        for process in processes:
            handle = process_identity.open_pidfd(process)
            if handle is not None:
                opened.callback(os.close, handle)
                handles.append(handle)
        for handle in handles:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        _wait_for_exit(handles)
    return len(handles)


def reap_at_start(places: VmFolders) -> dict[Path, VmRecord]:
    """End every VM that cannot be adopted, and remove its folder. Blocks.

    For a process that has just started and that owns the scratch folder alone.

    The folder of a lease with a damaged record stays: the lease may be in use and must not start
    again.

    Returns:
        Records of VMs that leases use, by VM folder; they may have exited meanwhile.
    """
    found = load_records(places)
    begun = {
        folder: noted
        for folder, noted in found.items()
        if noted.is_begun and _is_leased(folder, places) and not _is_suspended(folder.parent)
    }
    kept = {noted.process for noted in begun.values()}
    noted = {each.process for each in found.values()}
    kill_processes((noted | places.find_processes().keys()) - kept)
    for folder in places.folders():
        if folder not in begun and not (_is_leased(folder, places) and _is_damaged(folder)):
            shutil.rmtree(folder, ignore_errors=True)
    return begun


def find_orphans(
    seen: Mapping[ProcessId, Path], known: Collection[ProcessId], *, least_age_s: float
) -> list[ProcessId]:
    """Find VMMs older than `least_age_s` that no record names."""
    return [
        process
        for process, folder in seen.items()
        if process not in known
        and age_s(process) >= least_age_s
        and not _is_recorded(process, folder)
    ]


def _is_leased(folder: Path, places: VmFolders) -> bool:
    return folder.parent.parent == places.leases


def _is_damaged(folder: Path) -> bool:
    try:
        vm_record.load(folder)
    except CorruptError:
        return True
    return False


def _is_suspended(lease: Path) -> bool:
    """Tell whether the lease's VM is suspended to disk; processes that still run are leftovers."""
    return any(lease.glob(SUSPENDED))


def _is_recorded(process: ProcessId, folder: Path) -> bool:
    """Tell whether the record in its folder still names this process."""
    try:
        noted = vm_record.load(folder)
    except CorruptError:
        return False
    return noted is not None and noted.process == process


def _subfolders(folder: Path) -> Iterator[Path]:
    with contextlib.suppress(FileNotFoundError):
        yield from sorted(folder.iterdir())


def _mark(name: str, prefix: bytes) -> Path | None:
    try:
        data = Path(f"/proc/{name}/environ").read_bytes()
    except OSError:
        return None  # it has ended, or belongs to another user
    for entry in data.split(b"\0"):
        if entry.startswith(prefix):
            return Path(os.fsdecode(entry.partition(b"=")[2]))
    return None


def _mount_namespace(name: str) -> str:
    """Mount namespace of a process; empty if it has ended."""
    try:
        return os.readlink(f"/proc/{name}/ns/mnt")  # noqa: PTH115 - its text is no path
    except OSError:
        return ""


def _wait_for_exit(handles: Iterable[int]) -> None:
    waiting, limit_s = set(handles), time.monotonic() + EXIT_LIMIT_S
    while waiting and time.monotonic() < limit_s:
        # Not select(), which takes descriptors up to 1,023: a host has three for each VM.
        poller = poll()
        for handle in waiting:
            poller.register(handle, POLLIN)
        ready = poller.poll(1000 * max(0.0, limit_s - time.monotonic()))
        waiting.difference_update(handle for handle, _ in ready)
