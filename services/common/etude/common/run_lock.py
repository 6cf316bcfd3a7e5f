"""Who holds a run folder: the lock that a local runtime keeps for as long as it lives."""

import fcntl
import os
from pathlib import Path

LOCK = ".lock"
"""Held by the runtime for as long as it lives, with its process id inside."""


def is_running(folder: Path) -> bool:
    """Whether a runtime holds the folder; a process id alone may long belong to a stranger."""
    try:
        with (folder / LOCK).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False


def runtime_pid(folder: Path) -> int | None:
    """Process id of the runtime that holds the folder; None while none does, or has said so."""
    if not is_running(folder):
        return None
    written = (folder / LOCK).read_text().strip()
    # Between taking the lock and writing to it stands the id of the runtime before, if any.
    return int(written) if written.isdigit() and _is_alive(int(written)) else None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
