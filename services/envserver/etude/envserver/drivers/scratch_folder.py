"""A host's scratch folder: its lock, held by one process at a time, and folders for gradings."""

import asyncio
import contextlib
import fcntl
import itertools
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

from etude.envserver.drivers.base import DriverUnavailableError
from etude.envserver.storage import folders

LOCK_LIMIT_S = 10.0
"""A killed process may take a moment to release its files."""
_numbers = itertools.count()


async def lock_scratch(scratch: Path) -> int:
    """Lock the folder until the descriptor is closed or this process ends.

    Raises:
        DriverUnavailableError: another process holds the lock.
    """
    descriptor = os.open(scratch / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    limit_s = time.monotonic() + LOCK_LIMIT_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as cause:
            if time.monotonic() > limit_s:
                os.close(descriptor)
                raise DriverUnavailableError(
                    "another node daemon uses this scratch folder",
                    where=str(scratch),
                    fix="give each node a folder of its own (ETUDE_SCRATCH), or end the other one",
                ) from cause
            await asyncio.sleep(0.05)
        else:
            return descriptor


@contextlib.asynccontextmanager
async def grading_folder(leases: Path) -> AsyncIterator[Path]:
    """Make a lease folder for one grading, and remove it at the end of the block.

    It has no state file, so a successor sweeps what a dead host left here.
    """
    folder = leases / f"grade-{next(_numbers)}"
    folder.mkdir()
    try:
        yield folder
    finally:
        await asyncio.to_thread(folders.remove_folder, folder)
