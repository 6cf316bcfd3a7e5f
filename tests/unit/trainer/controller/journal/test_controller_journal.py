"""The journal: acknowledged means stored, damage is refused, the fenced are not heard."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typing_extensions import override

from etude.common.blobs import MemoryStore
from etude.common.durable_log import encode_segment
from etude.common.errors import CorruptError, FencedError, StoreError
from etude.common.store_retry import StoreRetry
from etude.common.weights import claim_epoch
from etude.trainer.controller.journal import segments, write_ahead_log
from etude.trainer.controller.journal.write_ahead_log import Journal
from etude.v1.journal_pb2 import JournalAdmit, JournalOpen, JournalRecord

RUN = "run-uid"


def opening(epoch: int, previous: int = 0, sequence: int = 0) -> JournalRecord:
    body = JournalOpen(
        run_uid=RUN, epoch=epoch, previous_epoch=previous, previous_sequence=sequence
    )
    return JournalRecord(open=body)


def admit(position: int) -> JournalRecord:
    return JournalRecord(admit=JournalAdmit(group_id=f"g{position}", position=position))


@contextlib.asynccontextmanager
async def writing(log: Journal) -> AsyncIterator[Journal]:
    task = asyncio.create_task(log.run(), name="journal")
    try:
        yield log
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def write_epoch(store: MemoryStore, positions: range) -> int:
    """One controller's life; returns its epoch."""
    epoch = claim_epoch(store, holder="test", parent=None, reason="start")
    before = write_ahead_log.recover_records(store, run_uid=RUN, before_epoch=epoch, since=0)
    async with writing(Journal(store, RUN, epoch, before.last_sequence + 1)) as log:
        log.append(opening(epoch, before.epoch, before.last_sequence))
        for position in positions:
            log.append(admit(position))
            if position % 3 == 0:
                await log.wait_durable()
        await log.wait_durable()
    return epoch


def positions(records: list[JournalRecord]) -> list[int]:
    return [r.admit.position for r in records if r.WhichOneof("body") == "admit"]


async def test_what_was_acknowledged_is_read_back_in_order_over_epochs() -> None:
    store = MemoryStore()
    await write_epoch(store, range(5))
    await write_epoch(store, range(5, 9))
    found = write_ahead_log.recover_records(store, run_uid=RUN, before_epoch=3, since=0)
    assert positions(found.records) == list(range(9))
    assert [r.sequence for r in found.records] == list(range(1, 12))
    assert (found.epoch, found.last_sequence) == (2, 11)


async def test_reading_from_a_sequence_skips_older_records_and_segments() -> None:
    store = MemoryStore()
    await write_epoch(store, range(5))
    await write_epoch(store, range(5, 9))
    for since in range(13):
        found = write_ahead_log.recover_records(store, run_uid=RUN, before_epoch=3, since=since)
        assert [r.sequence for r in found.records] == list(range(max(1, since), 12))
        assert found.last_sequence == 11


def test_an_empty_journal_is_no_error() -> None:
    assert write_ahead_log.recover_records(MemoryStore(), run_uid=RUN, before_epoch=1, since=0) == (
        0,
        0,
        [],
    )


async def test_a_fenced_controller_acknowledges_nothing_and_is_never_read() -> None:
    store = MemoryStore()
    epoch = await write_epoch(store, range(3))
    zombie = Journal(store, RUN, epoch, 5)
    await write_epoch(store, range(3, 5))
    zombie.append(admit(99))
    writer = asyncio.create_task(zombie.run(), name="zombie")
    with pytest.raises(FencedError, match="epoch 2"):
        await writer
    found = write_ahead_log.recover_records(store, run_uid=RUN, before_epoch=3, since=0)
    assert positions(found.records) == [0, 1, 2, 3, 4]


async def test_two_writers_of_one_epoch_do_not_mix() -> None:
    store = MemoryStore()
    claim_epoch(store, holder="a", parent=None, reason="start")
    store.create(write_ahead_log.segment_key(1, 1), b"somebody else's")
    log = Journal(store, RUN, 1, 1)
    log.append(admit(0))
    with pytest.raises(FencedError, match="another writer"):
        await asyncio.wait_for(log.run(), 5)


class FullStore(MemoryStore):
    """Refuses the next creates as a full disk does."""

    refusals = 0
    takes_effect = False

    @override
    def create(self, key: str, data: bytes) -> None:
        if self.refusals:
            self.refusals -= 1
            if self.takes_effect:
                super().create(key, data)
            raise StoreError(f"{self.url}/{key}: No space left on device (os error 28)")
        super().create(key, data)


@pytest.mark.parametrize("takes_effect", [False, True])
async def test_a_full_disk_is_waited_for_and_loses_nothing(*, takes_effect: bool) -> None:
    store = FullStore()
    claim_epoch(store, holder="a", parent=None, reason="start")
    store.refusals, store.takes_effect = 1, takes_effect
    async with writing(Journal(store, RUN, 1, 1)) as log:
        log.append(opening(1))
        log.append(admit(0))
        await asyncio.wait_for(log.wait_durable(), 10)
        assert log.store_retry.problem == ""
    assert positions(
        write_ahead_log.recover_records(store, run_uid=RUN, before_epoch=2, since=0).records
    ) == [0]


async def test_who_may_go_on_without_its_record_waits_only_until_the_store_fails() -> None:
    store = FullStore()
    claim_epoch(store, holder="a", parent=None, reason="start")
    async with writing(Journal(store, RUN, 1, 1)) as log:
        log.append(opening(1))
        await asyncio.wait_for(log.wait_durable_or_store_down(1), 10)
        assert (log.depth, log.is_away) == (0, False)
        store.refusals = 1
        sequence = log.append(admit(0))
        await asyncio.wait_for(log.wait_durable_or_store_down(sequence), 10)
        assert (log.depth, log.is_away) == (1, True)
        await asyncio.wait_for(log.wait_durable(sequence), 10)
        assert (log.depth, log.is_away) == (0, False)


async def test_a_store_that_stays_full_is_an_error_in_the_end() -> None:
    store = FullStore()
    claim_epoch(store, holder="a", parent=None, reason="start")
    store.refusals = 1000
    log = Journal(store, RUN, 1, 1, store_retry=StoreRetry(limit_s=0.0))
    log.append(admit(0))
    with pytest.raises(StoreError, match="No space left"):
        await asyncio.wait_for(log.run(), 10)


async def test_a_held_epoch_keeps_another_from_opening_and_no_record_from_its_store() -> None:
    store = MemoryStore()
    claim_epoch(store, holder="a", parent=None, reason="start")

    async def claim() -> int:
        return claim_epoch(store, holder="a", parent=None, reason="rollback", after=1)

    async with writing(Journal(store, RUN, 1, 1)) as log:
        log.append(opening(1))
        async with asyncio.timeout(30):
            async with log.hold_epoch() as epoch:
                another = asyncio.create_task(log.open_epoch(claim))
                log.append(admit(0))
                await log.wait_durable()
                assert (epoch, log.epoch, store.head("weights/epochs/000002.json")) == (1, 1, None)
            assert await another == log.epoch == 2
            await log.wait_durable()
    found = write_ahead_log.recover_records(store, run_uid=RUN, before_epoch=3, since=0)
    assert (positions(found.records), found.epoch) == ([0], 2)


async def test_a_missing_segment_in_the_middle_is_refused() -> None:
    store = MemoryStore()
    await write_epoch(store, range(9))
    middle = sorted(k for k in store.objects if k.startswith("journal/"))[1]
    del store.objects[middle]
    with pytest.raises(CorruptError, match="missing"):
        write_ahead_log.recover_records(store, run_uid=RUN, before_epoch=2, since=0)


async def test_another_runs_journal_is_refused() -> None:
    store = MemoryStore()
    await write_epoch(store, range(2))
    with pytest.raises(CorruptError, match="belongs to run"):
        write_ahead_log.recover_records(store, run_uid="other", before_epoch=2, since=0)


def example_segment() -> bytes:
    frames = []
    for sequence in (7, 8, 9):
        record = admit(sequence)
        record.sequence = sequence
        frames.append(segments.encode_record(record))
    return encode_segment(RUN, 3, first=7, frames=frames)


def test_a_segment_reads_back() -> None:
    found = segments.decode_segment(example_segment(), where="here")
    assert (found.run_uid, found.epoch, found.first, found.last) == (RUN, 3, 7, 9)


def test_a_segment_cut_at_any_byte_is_refused() -> None:
    data = example_segment()
    for end in range(len(data)):
        with pytest.raises(CorruptError, match="here"):
            segments.decode_segment(data[:end], where="here")
    with pytest.raises(CorruptError):
        segments.decode_segment(data + b"\0", where="here")


@settings(max_examples=200)
@given(st.data())
def test_a_segment_with_any_bit_flipped_is_refused(data: st.DataObject) -> None:
    raw = bytearray(example_segment())
    bit = data.draw(st.integers(0, len(raw) * 8 - 1))
    raw[bit // 8] ^= 1 << bit % 8
    with pytest.raises(CorruptError):
        segments.decode_segment(bytes(raw), where="here")


def test_a_record_without_a_body_is_our_mistake() -> None:
    with pytest.raises(ValueError, match="body"):
        segments.encode_record(JournalRecord(sequence=1))


async def test_a_large_backlog_is_cut_into_segments_that_a_store_takes() -> None:
    store = MemoryStore()
    claim_epoch(store, holder="a", parent=None, reason="start")
    async with writing(Journal(store, RUN, 1, 1)) as log:
        log.append(opening(1))
        for position in range(5):
            record = admit(position)
            record.admit.task_id = "x" * (5 << 20)
            log.append(record)
        await asyncio.wait_for(log.wait_durable(), 30)
    sizes = [len(v) for k, v in store.objects.items() if k.startswith("journal/")]
    assert len(sizes) == 2
    assert max(sizes) <= 16 << 20
