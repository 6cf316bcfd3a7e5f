"""Rows and rollouts on their way to a record that may be away."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from typing_extensions import override

from etude.common.blobs import MemoryStore
from etude.common.errors import StoreError
from etude.common.record import Row, StoreRecord
from etude.trainer.controller.recording import Recording


@dataclass(slots=True)
class FullRecord(StoreRecord):
    """Refuses what it is given as a full disk does."""

    is_full: bool = True

    @override
    def append(self, rows: Sequence[Row]) -> None:
        if self.is_full:
            raise OSError(28, "No space left on device")
        StoreRecord.append(self, rows)

    @override
    def write_rollouts(self, step: int, split: str, rollouts: Iterable[Row]) -> None:
        raise StoreError("the bucket is gone")


async def test_rows_wait_in_order_for_a_record_that_is_away() -> None:
    record = FullRecord(MemoryStore())
    recording = Recording(record)
    recording.note({"kind": "a"})
    await recording.write_rows()
    recording.note({"kind": "b"})
    await recording.write_rows()
    assert "No space left" in recording.trouble
    record.is_full = False
    await recording.finish()
    assert recording.trouble == ""
    assert [row["kind"] for row in record.rows()] == ["a", "b"]


async def test_rollouts_that_cannot_be_written_fail_nothing() -> None:
    recording = Recording(FullRecord(MemoryStore()))
    recording.write_rollouts(1, "train", lambda: [{"rollout_id": "r"}])
    await recording.finish()
