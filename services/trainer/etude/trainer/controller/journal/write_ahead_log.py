"""Write-ahead log (journal) of the controller: appended in order, durable once in the store."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from typing_extensions import override

from etude.common import durable_log
from etude.common.blobs import Store
from etude.common.durable_log import DurableLog, LogEnd, LogOpening, LogReader, LogRecord, LogSource
from etude.common.durable_log.log import QueuedFrame
from etude.common.weights import is_fenced
from etude.trainer.controller.journal import segments
from etude.trainer.controller.journal.record_parts import (
    PreparedRecord,
    join_parts,
    prepare_record,
    split_data,
)
from etude.v1 import journal_pb2

JOURNAL = "journal/"


def segment_key(epoch: int, first: int) -> str:
    """Key of the segment whose first record has this sequence."""
    return durable_log.segment_key(JOURNAL, epoch, first)


@dataclass(slots=True)
class Journal(DurableLog):
    """Log of one epoch of a controller. Append from the event loop only; run() does all writing."""

    branch: journal_pb2.JournalBranch | None = None
    """Recorded by every epoch as it opens; None unless the run was restored to a checkpoint."""
    _holding: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    """Held by a caller of hold_epoch(), or while the epoch changes; taken before _writing."""

    @property
    @override
    def prefix(self) -> str:
        return JOURNAL

    @override
    def is_fenced(self) -> bool:
        return is_fenced(self.store, self.epoch)

    def append(self, record: journal_pb2.JournalRecord) -> int:
        """Queue a record and return its sequence. Wait until it is durable before acting on it."""
        return self.append_prepared(prepare_record(record))

    def append_prepared(self, prepared: PreparedRecord) -> int:
        """Queue a record as append() does, without serialising a large one on the event loop."""
        record = prepared.record
        if prepared.data is None:
            record.sequence = self.next_sequence
            self.enqueue(segments.encode_record(record))
        else:
            for part in split_data(prepared.data):
                record.sequence = self.enqueue(part)
        return record.sequence

    async def open_epoch(self, claim: Callable[[], Awaitable[int]]) -> int:
        """Open a new epoch behind the newest record; records appended meanwhile follow it.

        Args:
            claim: opens the epoch, and thereby fences writes of the old one.

        Returns:
            The new epoch.

        Raises:
            FencedError: another controller took over.
            StoreError: the store stayed away.
        """
        async with self._holding, self._writing:
            while self._queue:
                await self._flush()
            # Nothing runs between the last flush and this: the OPEN comes right after it.
            sequence = self.next_sequence
            self.next_sequence += 1
            epoch = await claim()
            opening = journal_pb2.JournalOpen(
                run_uid=self.owner,
                epoch=epoch,
                previous_epoch=self.epoch,
                previous_sequence=sequence - 1,
                branch=self.branch,
            )
            record = journal_pb2.JournalRecord(sequence=sequence, open=opening)
            frame = QueuedFrame(sequence, segments.encode_record(record))
            self._queue.insert(0, frame)
            self.pending_bytes += frame.num_bytes
            self.epoch = epoch
        self._work.set()
        return epoch

    @contextlib.asynccontextmanager
    async def hold_epoch(self) -> AsyncIterator[int]:
        """Keep this controller from opening another epoch; records are written meanwhile."""
        async with self._holding:
            yield self.epoch


class RecoveredJournal(NamedTuple):
    """Records that earlier epochs left."""

    epoch: int
    """Epoch of the newest accepted record; 0 for an empty journal."""
    last_sequence: int
    """Sequence of the newest record; 0 for an empty journal."""
    records: list[journal_pb2.JournalRecord]
    """In order, from the requested sequence on; those in parts are joined."""


def newest_open_record(store: Store, *, run_uid: str) -> journal_pb2.JournalOpen | None:
    """Read the opening record of the newest epoch; None for an empty journal.

    Raises:
        CorruptError: its first segment is damaged, or of another run.
    """
    reader = LogReader.read_listing(_source(store, run_uid))
    epoch = reader.newest_epoch()
    if not epoch:
        return None
    return segments.parse_record(reader.read_first_record(epoch), store.url).open


def recover_records(
    store: Store, *, run_uid: str, before_epoch: int, since: int, upto: LogEnd | None = None
) -> RecoveredJournal:
    """Read the accepted records of all epochs below one.

    Args:
        store: the run's store.
        run_uid: records of another run are refused.
        before_epoch: the epoch that the caller claimed; it must not have records yet.
        since: first sequence of interest.
        upto: the last accepted record, if the run is restored to a checkpoint.

    Raises:
        CorruptError: a segment is damaged, missing, or of another run.
    """
    reader = LogReader.read_listing(_source(store, run_uid))
    records: list[journal_pb2.JournalRecord] = []
    end = 0
    for segment in reader.accepted_segments(before_epoch=before_epoch, since=since, upto=upto):
        end = segment.end
        records += [segments.parse_record(record, segment.where) for record in segment.records]
    newest = reader.newest_epoch(before=before_epoch) if upto is None else upto.epoch
    return RecoveredJournal(newest, end, list(join_parts(records)))


def _source(store: Store, run_uid: str) -> LogSource:
    return LogSource(store, JOURNAL, run_uid, _parse_opening)


def _parse_opening(framed: LogRecord, where: str) -> LogOpening | None:
    record = segments.parse_record(framed, where)
    if record.WhichOneof("body") != "open":
        return None
    body = record.open
    return LogOpening(body.epoch, body.previous_epoch, body.previous_sequence)
