"""Which monitors run for a node: as it wrote them down, and as the kernel shows them.

Nothing here ends a process that is not below the node's own scratch folder in its own view of the
file system: several nodes may share a host.
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
from etude.envserver.drivers.machines import identity, record
from etude.envserver.drivers.machines.identity import EXIT_LIMIT_S, MARK, ProcessId
from etude.envserver.drivers.machines.record import VmRecord

MACHINE = "machine"
"""Folder of the machine in that of its lease."""
ASLEEP = "asleep.*"
"""What a machine that was written to the disk is called, in the folder of its lease."""
_BRIEF = ("boot-*", "probe-*")
"""Folders of machines that are no environments."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where a node keeps the folders of its machines."""

    scratch: Path

    @property
    def leases(self) -> Path:
        """One folder for each lease, with at most one machine in it."""
        return self.scratch / "leases"

    @property
    def stock(self) -> Path:
        """One folder for each machine that is no lease's yet."""
        return self.scratch / "stock"

    def seen(self) -> dict[ProcessId, Path]:
        """Every monitor that was started here, and the folder it was started for."""
        return marked(self.scratch)

    def folders(self) -> list[Path]:
        """Every folder of a machine.

        In this order none is missed that becomes a lease's meanwhile.
        """
        others = [each for name in _BRIEF for each in sorted(self.scratch.glob(name))]
        stock = list(_inside(self.stock))
        leased = [folder / MACHINE for folder in _inside(self.leases)]
        return [*others, *stock, *(folder for folder in leased if folder.is_dir())]


def recorded(places: Places) -> dict[Path, VmRecord]:
    """What is written down, by the machine's folder; what cannot be read is left out."""
    found = {}
    for folder in places.folders():
        with contextlib.suppress(CorruptError):
            noted = record.load(folder)
            if noted is not None:
                found[folder] = noted
    return found


def marked(scratch: Path) -> dict[ProcessId, Path]:
    """Every monitor that was started below a folder, and the folder it was started for."""
    prefix = f"{MARK}={scratch.resolve()}{os.sep}".encode()
    view = _view("self")
    found = {}
    for entry in os.scandir("/proc"):
        name = entry.name
        mark = _mark(name, prefix) if name.isdecimal() else None
        process = identity.identify(int(name)) if mark and _view(name) == view else None
        if process is not None and mark is not None:
            found[process] = mark
    return found


def age_s(process: ProcessId) -> float:
    """How long ago it was started."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - process.started / _TICKS_PER_S


def end(processes: Iterable[ProcessId]) -> int:
    """Kill processes and wait until they are gone; answers how many there were."""
    with contextlib.ExitStack() as opened:
        handles = []
        for process in processes:
            handle = identity.handle(process)
            if handle is not None:
                opened.callback(os.close, handle)
                handles.append(handle)
        for handle in handles:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        _wait(handles)
    return len(handles)


def clear(places: Places) -> dict[Path, VmRecord]:
    """End every machine that nobody can take up, and remove its folder. Blocks.

    For a process that has just started and that nobody else shares the scratch folder with.

    Of a lease whose record is damaged the folder stays: it may have begun, and must not begin anew.

    Returns:
        The machines of leases that had begun, by folder; whether they still run is not looked at.
    """
    found = recorded(places)
    begun = {
        folder: noted
        for folder, noted in found.items()
        if noted.is_begun and _is_leased(folder, places) and not _sleeps(folder.parent)
    }
    kept = {noted.process for noted in begun.values()}
    noted = {each.process for each in found.values()}
    end((noted | places.seen().keys()) - kept)
    for folder in places.folders():
        if folder not in begun and not (_is_leased(folder, places) and _is_damaged(folder)):
            shutil.rmtree(folder, ignore_errors=True)
    return begun


def orphans(
    seen: Mapping[ProcessId, Path], known: Collection[ProcessId], *, least_age_s: float
) -> list[ProcessId]:
    """Monitors that run and that nobody has written down for so long."""
    return [
        process
        for process, folder in seen.items()
        if process not in known and age_s(process) >= least_age_s and not _is_noted(process, folder)
    ]


def _is_leased(folder: Path, places: Places) -> bool:
    return folder.parent.parent == places.leases


def _is_damaged(folder: Path) -> bool:
    try:
        record.load(folder)
    except CorruptError:
        return True
    return False


def _sleeps(lease: Path) -> bool:
    """Whether the lease's machine is what a file says, not what may still run of it."""
    return any(lease.glob(ASLEEP))


def _is_noted(process: ProcessId, folder: Path) -> bool:
    """Whether the folder it was started for is still its own."""
    try:
        noted = record.load(folder)
    except CorruptError:
        return False
    return noted is not None and noted.process == process


def _inside(folder: Path) -> Iterator[Path]:
    with contextlib.suppress(FileNotFoundError):
        yield from sorted(folder.iterdir())


def _mark(name: str, prefix: bytes) -> Path | None:
    try:
        data = Path(f"/proc/{name}/environ").read_bytes()
    except OSError:
        return None  # it has ended, or is none of ours to look at
    for entry in data.split(b"\0"):
        if entry.startswith(prefix):
            return Path(os.fsdecode(entry.partition(b"=")[2]))
    return None


def _view(name: str) -> str:
    """Which view of the file system a process has; empty if it has ended."""
    try:
        return os.readlink(f"/proc/{name}/ns/mnt")  # noqa: PTH115 - its text is no path
    except OSError:
        return ""


def _wait(handles: Iterable[int]) -> None:
    waiting, limit_s = set(handles), time.monotonic() + EXIT_LIMIT_S
    while waiting and time.monotonic() < limit_s:
        # Not select(), whose handles end at 1,023: a node has three for each machine.
        poller = poll()
        for handle in waiting:
            poller.register(handle, POLLIN)
        ready = poller.poll(1000 * max(0.0, limit_s - time.monotonic()))
        waiting.difference_update(handle for handle, _ in ready)
