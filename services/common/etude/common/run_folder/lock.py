"""Lock of a run folder, which a local runtime holds while it lives."""

import fcntl
import os
from pathlib import Path

LOCK = ".lock"
"""File that the runtime holds locked while it lives, with its process id inside."""


def is_running(folder: Path) -> bool:
    """Return true if a runtime holds the folder; a process id alone may have been reused."""
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
