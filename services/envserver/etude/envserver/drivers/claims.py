"""A node's scratch folder, which one process has at a time."""

import asyncio
import fcntl
import os
import time
from pathlib import Path

from etude.envserver.drivers.base import DriverUnavailableError

PATIENCE_S = 10.0
"""A process that was killed may need a moment to give its files back."""


async def claimed(scratch: Path) -> int:
    """A lock on the folder that ends with this process, or when it is closed.

    Raises:
        DriverUnavailableError: another process has it.
    """
    descriptor = os.open(scratch / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    limit_s = time.monotonic() + PATIENCE_S
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
