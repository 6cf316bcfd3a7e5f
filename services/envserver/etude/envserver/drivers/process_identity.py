"""Identity of a process that survives reuse of its PID."""

import asyncio
import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

MARK = "ETUDE_MACHINE"
"""Environment variable with a VMM's folder, for discovery of processes without a record."""
EXIT_LIMIT_S = 10.0
"""Longest time a killed process takes to exit."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_STATE, _STARTED = 0, 19
"""Field numbers in /proc/PID/stat, counted after the program's name."""
_ENDED = frozenset({"Z", "X", "x"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessId:
    """Unique identity of a process: PID, start time, and boot of the machine."""

    pid: int
    started: int
    """Clock ticks since boot."""
    boot: str


def mark_value(folder: Path) -> str:
    """Value of MARK for a VM folder."""
    return str(folder.resolve())


def identify(pid: int) -> ProcessId | None:
    """Identify the process that has this PID now; None if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The program's name is in parentheses and may contain any character.
    fields = text.rpartition(")")[2].split()
    if fields[_STATE] in _ENDED:
        return None
    return ProcessId(pid=pid, started=int(fields[_STARTED]), boot=boot_id())


def open_pidfd(process: ProcessId) -> int | None:
    """Open a pidfd of the process, readable once it has exited; None if it has."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None
    # Checked after the open, so that the descriptor is not another process's.
    if identify(process.pid) != process:
        os.close(descriptor)
        return None
    return descriptor


def exit_future(pidfd: int, reap: Callable[[], int | None]) -> "asyncio.Future[int | None]":
    """Future that is done once the process has exited."""
    loop = asyncio.get_running_loop()
    exited: asyncio.Future[int | None] = loop.create_future()

    def on_exit() -> None:
        loop.remove_reader(pidfd)
        os.close(pidfd)
        exited.set_result(reap())

    loop.add_reader(pidfd, on_exit)
    return exited


@functools.cache
def boot_id() -> str:
    """Boot id of the machine, different after each reboot."""
    return _BOOT_ID.read_text(encoding="ascii").strip()
