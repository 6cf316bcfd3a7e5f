"""What a piece of work costs: seconds of wall and processor, and bytes of memory at its peak."""

import ctypes
import gc
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch


class Cost(NamedTuple):
    """The best of some repetitions, each figure for itself."""

    wall_s: float
    cpu_s: float


def settle() -> None:
    """One thread, and no garbage of what was imported: collections are then quick."""
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()


def pin() -> int:
    """Keep this process on one processor; which one."""
    processor = max(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {processor})
    return processor


def cost(
    work: Callable[[], object],
    *,
    before: Callable[[], object] = lambda: None,
    repeats: int,
) -> Cost:
    """What `work` costs; `before` puts things back each time and is not counted."""
    found = []
    for _ in range(repeats):
        before()
        gc.collect()
        wall, cpu = time.perf_counter(), time.process_time()
        work()
        found.append(Cost(time.perf_counter() - wall, time.process_time() - cpu))
    return Cost(min(each.wall_s for each in found), min(each.cpu_s for each in found))


def peak_bytes(work: Callable[[], Any]) -> int:
    """Resident memory that `work` takes at its peak, with its result, beyond what is held before.

    Freed memory goes back to the system first, else the work would fill it without a trace.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    held = _memory("VmRSS")
    result = work()
    peak = _memory("VmHWM")
    del result
    return max(0, peak - held)


def _memory(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))
