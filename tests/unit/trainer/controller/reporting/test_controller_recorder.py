"""Rows and rollouts on their way to a record that may be away."""

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from typing_extensions import override

from etude.common.blobs import MemoryStore
from etude.common.errors import StoreError
from etude.common.run_folder.record import Row, StoreRecord
from etude.trainer.controller.reporting.recorder import RunRecorder


@dataclass(slots=True)
class FullRecord(StoreRecord):
    """Refuses what it is given as a full disk does."""

    is_full: bool = True

    @override
    def append(self, rows: Sequence[Row]) -> None:
        if self.is_full:
            raise OSError(28, "No space left on device")
        StoreRecord.append(self, rows)


async def test_rows_wait_in_order_for_a_record_that_is_away() -> None:
    record = FullRecord(MemoryStore())
    recording = RunRecorder(record)
    recording.add_row({"kind": "a"})
    await recording.write_rows()
    recording.add_row({"kind": "b"})
    await recording.write_rows()
    assert "No space left" in recording.problem
    record.is_full = False
    await recording.finish()
    assert recording.problem == ""
    assert [row["kind"] for row in record.rows()] == ["a", "b"]


async def test_rollouts_that_cannot_be_written_fail_nothing() -> None:
    async def fail() -> None:
        raise StoreError("the bucket is gone")

    recording = RunRecorder(FullRecord(MemoryStore()))
    recording.write_rollouts("rollouts of step 1", fail())
    await recording.finish()


@dataclass(slots=True)
class SlowRecord(StoreRecord):
    """Keeps its first writer until it is let go, and then refuses it if told to."""

    refuses: bool = False
    begun: threading.Event = field(default_factory=threading.Event)
    let_go: threading.Event = field(default_factory=threading.Event)

    @override
    def append(self, rows: Sequence[Row]) -> None:
        if not self.begun.is_set():
            self.begun.set()
            self.let_go.wait(10)
            if self.refuses:
                raise StoreError("the bucket is gone")
        StoreRecord.append(self, rows)


async def test_rows_noted_during_a_write_follow_it() -> None:
    record = SlowRecord(MemoryStore())
    recording = RunRecorder(record)
    recording.add_row({"kind": "a"})
    first = asyncio.create_task(recording.write_rows())
    await asyncio.to_thread(record.begun.wait)
    recording.add_row({"kind": "b"})
    second = asyncio.create_task(recording.write_rows())
    await asyncio.wait({second}, timeout=0.2)
    record.let_go.set()
    await asyncio.gather(first, second)
    assert [row["kind"] for row in record.rows()] == ["a", "b"]


async def test_a_write_that_is_refused_after_its_task_was_cancelled_loses_no_row() -> None:
    record = SlowRecord(MemoryStore(), refuses=True)
    recording = RunRecorder(record)
    recording.add_row({"kind": "a"})
    writer = asyncio.create_task(recording.write_rows())
    await asyncio.to_thread(record.begun.wait)
    writer.cancel()
    recording.add_row({"kind": "b"})
    last = asyncio.create_task(recording.write_rows())
    await asyncio.wait({last}, timeout=0.2)
    record.let_go.set()
    await last
    assert [row["kind"] for row in record.rows()] == ["a", "b"]
