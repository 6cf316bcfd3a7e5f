"""Durable appends of the journal, against one fsync for each record, on the same folder."""

import asyncio
import math
import os
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from etude.common.blobs import open_store
from etude.trainer.controller.journal.write_ahead_log import Journal
from etude.v1 import journal_pb2, rollout_pb2

PRODUCERS, AWAITED = 32, 8
"""Producers, and the records that each has in flight: as many as a group has siblings."""
RECORD_BYTES = 2048


class AppendFigures(NamedTuple):
    """Figures of one run of the journal, and of its peer."""

    per_s: float
    cpu_s: float
    p99_ms: float
    """From an append to its acknowledgement."""
    fsync_per_s: float
    """Records, with one fsync each."""


def measure_appends(seconds: float) -> AppendFigures:
    """Append from many producers that await their records, then with one fsync each."""
    with tempfile.TemporaryDirectory(prefix="etude-bench-") as name:
        folder = Path(name)
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        waits_s = asyncio.run(_append(folder, seconds))
        wall_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
        waits_s.sort()
        p99_s = waits_s[math.ceil(0.99 * len(waits_s)) - 1]
        per_s = len(waits_s) / wall_s
        return AppendFigures(per_s, cpu_s, 1e3 * p99_s, _fsync_each(folder, seconds / 2))


async def _append(folder: Path, seconds: float) -> list[float]:
    """Time of each record until it was durable."""
    journal = Journal(open_store(folder.as_uri()), "bench", 1, 1)
    writing = asyncio.create_task(journal.run(), name="journal")
    waits_s: list[float] = []
    ends_s = time.perf_counter() + seconds

    async def produce(number: int) -> None:
        text = f"{number:02d}" * (RECORD_BYTES // 2)
        while time.perf_counter() < ends_s:
            began_s = time.perf_counter()
            for _ in range(AWAITED):
                rollout = rollout_pb2.Rollout(final_message=text)
                body = journal_pb2.JournalRollout(rollout=rollout)
                journal.append(journal_pb2.JournalRecord(rollout=body))
            await journal.wait_durable(journal.last_sequence)
            waits_s.extend([time.perf_counter() - began_s] * AWAITED)

    await asyncio.gather(*(produce(number) for number in range(PRODUCERS)))
    writing.cancel()
    await asyncio.wait([writing])
    return waits_s


def _fsync_each(folder: Path, seconds: float) -> float:
    count, ends_s = 0, time.perf_counter() + seconds
    began_s = time.perf_counter()
    with (folder / "peer").open("wb", buffering=0) as file:
        while time.perf_counter() < ends_s:
            file.write(bytes(RECORD_BYTES))
            os.fdatasync(file.fileno())
            count += 1
    return count / (time.perf_counter() - began_s)
