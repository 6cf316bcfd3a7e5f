"""Processes of a fork server and its children, as seen in /proc."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Collection, Iterator
from pathlib import Path

from etude.envserver.drivers.process_identity import MARK, identify, mark_value
from etude.envserver.drivers.vm.errors import VmmError

_NAMED_LIMIT_S = 20.0
"""A child does so first, as soon as it has a core."""
_LOOK_S = 0.001
_LOOKS = 5
"""Consecutive checks, since threads cannot be checked at one moment."""
_ENDING_LOOKS = 50
_PARENT, _GROUP = 1, 2
"""Field numbers in /proc/PID/stat, counted after the program's name."""


async def wait_until_idle(pid: int) -> None:
    """Wait until all threads of a VMM sleep, after its last connection was closed.

    A thread that is forked while it holds a lock cannot release it: the lock has the id of the
    parent's thread.

    Raises:
        VmmError: some keep running.
    """
    limit_s = time.monotonic() + _NAMED_LIMIT_S
    num_seen = 0
    while num_seen < _LOOKS:
        num_seen = num_seen + 1 if _all_wait(pid) else 0
        if time.monotonic() > limit_s:
            raise VmmError(f"threads of VM {pid} do not become idle")
        await asyncio.sleep(_LOOK_S)


async def wait_until_named(pid: int, folder: Path) -> None:
    """Wait until a child has replaced its parent's folder name in its environment by its own.

    Raises:
        VmmError: it has ended, or has another folder.
    """
    wanted = f"{MARK}={mark_value(folder)}".encode()
    limit_s = time.monotonic() + _NAMED_LIMIT_S
    while wanted not in _environment(pid):
        if identify(pid) is None:
            how = await _how(pid)
            raise VmmError(f"VM {pid} ended {how}instead of becoming that of {folder}")
        if time.monotonic() > limit_s:
            raise VmmError(f"VM {pid} is not that of {folder}")
        await asyncio.sleep(_LOOK_S)


def kill_children(group: int, spared: Collection[int]) -> None:
    """Kill all children of this process in a process group, except some. Blocks.

    A VMM leads a group, and what it forks stays in it.
    """
    while found := [each for each in _children(group) if each not in spared]:
        _kill(found)


def _kill(pids: Collection[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _all_wait(pid: int) -> bool:
    try:
        texts = [(each / "stat").read_text() for each in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return False  # a thread has just ended
    return all(text.rpartition(")")[2].split()[0] == "S" for text in texts)


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []  # it has ended


async def _how(pid: int) -> str:
    # Its first thread may end before the others, which free the memory.
    for _ in range(_ENDING_LOOKS):
        if said := _status(pid):
            return said
        await asyncio.sleep(_LOOK_S)
    return ""


def _status(pid: int) -> str:
    try:
        seen = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return ""
    if seen is None:
        return ""
    return f"with {seen.si_status if seen.si_code == os.CLD_EXITED else -seen.si_status} "


def _children(group: int) -> Iterator[int]:
    wanted = (os.getpid(), group)
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                text = Path(f"/proc/{entry.name}/stat").read_text(errors="replace")
                # The program's name stands in brackets and may hold any.
                fields = text.rpartition(")")[2].split()
                if (int(fields[_PARENT]), int(fields[_GROUP])) == wanted:
                    yield int(entry.name)
