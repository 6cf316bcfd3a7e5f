"""Which process a monitor is, also after its number was given to another one."""

import asyncio
import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

MARK = "ETUDE_MACHINE"
"""In a monitor's environment: its folder, by which one that was never written down is found."""
EXIT_LIMIT_S = 10.0
"""A monitor that was killed has ended by then."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_STATE, _STARTED = 0, 19
"""Places in /proc/PID/stat behind the program's name."""
_ENDED = frozenset({"Z", "X", "x"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessId:
    """A process for good: no other one, before or after it, has the same three."""

    pid: int
    started: int
    """Clock ticks from the host's boot."""
    boot: str
    """Of the host."""


def name_of(folder: Path) -> str:
    """What a monitor's environment calls its folder."""
    return str(folder.resolve())


def identify(pid: int) -> ProcessId | None:
    """The process that has this number now; None if none runs under it."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The program's name stands in brackets and may hold any.
    fields = text.rpartition(")")[2].split()
    if fields[_STATE] in _ENDED:
        return None
    return ProcessId(pid=pid, started=int(fields[_STARTED]), boot=boot_id())


def handle(process: ProcessId) -> int | None:
    """A descriptor of the process, which is readable once it has ended; None if it has."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None
    # Asked in this order, the descriptor cannot be another's.
    if identify(process.pid) != process:
        os.close(descriptor)
        return None
    return descriptor


def exit_of(pidfd: int, reap: Callable[[], int | None]) -> "asyncio.Future[int | None]":
    """Done once the process has ended.

    Args:
        pidfd: its descriptor, which is closed then.
        reap: answers its exit code then, if it is a child of this process.
    """
    loop = asyncio.get_running_loop()
    exited: asyncio.Future[int | None] = loop.create_future()

    def ended() -> None:
        loop.remove_reader(pidfd)
        os.close(pidfd)
        exited.set_result(reap())

    loop.add_reader(pidfd, ended)
    return exited


@functools.cache
def boot_id() -> str:
    """What tells this life of the host from those before it."""
    return _BOOT_ID.read_text(encoding="ascii").strip()
