"""Machines that are read from the disk, and callers that go away meanwhile."""

import asyncio
import os
import threading

import pytest

from etude.envserver.drivers.vm import sealed_files
from etude.envserver.drivers.vm.interface import VmDelta
from etude.envserver.drivers.vm.suspend.lease_vm import load_delta


async def test_who_is_cancelled_while_a_vm_is_read_leaves_no_file_open() -> None:
    stream = sealed_files.create_sealed("saved", [b"state"])
    disk = sealed_files.create("disk", 4096)
    is_reading, may_end = threading.Event(), threading.Event()

    def slowly() -> VmDelta:
        is_reading.set()
        may_end.wait()
        return VmDelta(template="t", is_full=False, stream=stream, changed_bytes=1, disk=disk)

    reading = asyncio.create_task(load_delta(slowly))
    await asyncio.to_thread(is_reading.wait)
    reading.cancel()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await reading
    for each in (stream, disk):
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(each)
