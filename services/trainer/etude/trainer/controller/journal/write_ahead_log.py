"""Write-ahead log (journal) of the controller: appended in order, durable once in the store."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from etude.common.blobs import MAX_CREATE_BYTES, ExistsError, Store
from etude.common.errors import CorruptError, FencedError, StoreError
from etude.common.weights import is_fenced
from etude.trainer.controller.journal import segments
from etude.trainer.controller.journal.record_parts import (
    PreparedRecord,
    RecordPart,
    join_parts,
    prepare_record,
    split_data,
)
from etude.trainer.controller.store_retry import StoreRetry
from etude.v1 import journal_pb2

JOURNAL = "journal/"

LINGER_S = 0.25
"""Delay of a record that no caller awaits, to batch it: each object costs a round trip."""

_ROOM = MAX_CREATE_BYTES - 4_096
"""Bytes of records in one segment; header and commit need the rest."""


def segment_key(epoch: int, first: int) -> str:
    """Key of the segment whose first record has this sequence."""
    return f"{JOURNAL}{epoch:06d}/{first:012d}.wal"


_PART_HEADER_BYTES = 64
"""At most so many are added to the data of a part."""


class _QueuedRecord(NamedTuple):
    sequence: int
    content: bytes | RecordPart
    """A record in its frame, or a part, which is framed in the thread that writes it."""

    @property
    def num_bytes(self) -> int:
        if isinstance(self.content, RecordPart):
            return len(self.content.data) + _PART_HEADER_BYTES
        return len(self.content)

    def frame(self) -> bytes:
        if isinstance(self.content, RecordPart):
            return segments.encode_record(self.content.message(self.sequence))
        return self.content


@dataclass(slots=True)
class Journal:
    """Log of one epoch. Append from the event loop only; run() does all writing."""

    store: Store
    run_uid: str
    epoch: int
    next_sequence: int
    branch: journal_pb2.JournalBranch | None = None
    """Recorded by every epoch as it opens; None unless the run was restored to a checkpoint."""
    store_retry: StoreRetry = field(default_factory=StoreRetry)
    is_away: bool = False
    """True while the newest write failed and is retried."""
    _queue: list[_QueuedRecord] = field(default_factory=list)
    _durable: int = field(init=False)
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    _work: asyncio.Event = field(default_factory=asyncio.Event)
    _urgent: asyncio.Event = field(default_factory=asyncio.Event)
    _writing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a segment is written, or while the epoch changes."""
    _holding: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by a caller of hold_epoch(), or while the epoch changes; taken before _writing."""

    def __post_init__(self) -> None:
        self._durable = self.next_sequence - 1

    @property
    def last_sequence(self) -> int:
        """Sequence of the newest record, durable or not."""
        return self.next_sequence - 1

    @property
    def depth(self) -> int:
        """Number of records that are not durable yet."""
        return self.last_sequence - self._durable

    def append(self, record: journal_pb2.JournalRecord) -> int:
        """Queue a record and return its sequence. Wait until it is durable before acting on it."""
        return self.append_prepared(prepare_record(record))

    def append_prepared(self, prepared: PreparedRecord) -> int:
        """Queue a record as append() does, without serialising a large one on the event loop."""
        record = prepared.record
        contents: list[RecordPart] | list[bytes]
        if prepared.data is None:
            record.sequence = self.next_sequence
            contents = [segments.encode_record(record)]
        else:
            contents = split_data(prepared.data)
            record.sequence = self.last_sequence + len(contents)
        for content in contents:
            self._queue.append(_QueuedRecord(self.next_sequence, content))
            self.next_sequence += 1
        self._work.set()
        return record.sequence

    async def wait_durable(self, sequence: int | None = None) -> None:
        """Wait until a record and all before it are in the store; the newest one if None."""
        target = self.last_sequence if sequence is None else sequence
        self._urgent.set()
        async with self._changed:
            await self._changed.wait_for(lambda: self._durable >= target)

    async def wait_durable_or_store_down(self, sequence: int) -> None:
        """Wait until a record is durable, or the store fails."""
        self._urgent.set()
        async with self._changed:
            await self._changed.wait_for(lambda: self._durable >= sequence or self.is_away)

    async def run(self) -> None:
        """Write until cancelled.

        Raises:
            StoreError: the store stayed away longer than the retry limit.
            FencedError: a newer controller took over; nothing was acknowledged since.
        """
        while True:
            await self._work.wait()
            try:
                async with asyncio.timeout(LINGER_S):
                    await self._urgent.wait()
            except TimeoutError:
                pass
            self._urgent.clear()
            self._work.clear()
            while self._queue:
                async with self._writing:
                    await self._flush()

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
                run_uid=self.run_uid,
                epoch=epoch,
                previous_epoch=self.epoch,
                previous_sequence=sequence - 1,
                branch=self.branch,
            )
            record = journal_pb2.JournalRecord(sequence=sequence, open=opening)
            self._queue.insert(0, _QueuedRecord(sequence, segments.encode_record(record)))
            self.epoch = epoch
        self._work.set()
        return epoch

    @contextlib.asynccontextmanager
    async def hold_epoch(self) -> AsyncIterator[int]:
        """Keep this controller from opening another epoch; records are written meanwhile."""
        async with self._holding:
            yield self.epoch

    async def _flush(self) -> None:
        records = self._take()
        if not records:
            return
        await self.store_retry.retry(
            segment_key(self.epoch, records[0].sequence), lambda: self._try_write(records)
        )
        async with self._changed:
            self._durable = records[-1].sequence
            self._changed.notify_all()

    def _take(self) -> list[_QueuedRecord]:
        count = size = 0
        while count < len(self._queue):
            size += self._queue[count].num_bytes
            if count and size > _ROOM:
                break
            count += 1
        taken, self._queue = self._queue[:count], self._queue[count:]
        return taken

    async def _try_write(self, records: Sequence[_QueuedRecord]) -> None:
        try:
            await asyncio.to_thread(self._write_segment, records)
        except StoreError:
            async with self._changed:
                self.is_away = True
                self._changed.notify_all()
            raise
        self.is_away = False

    def _write_segment(self, records: Sequence[_QueuedRecord]) -> None:
        first = records[0].sequence
        frames = [record.frame() for record in records]
        data = segments.encode_segment(self.run_uid, self.epoch, first=first, frames=frames)
        _create(self.store, segment_key(self.epoch, first), data)
        # A successor claims its epoch before it reads this log. A segment written before the claim
        # is read by it, and a later one is never acknowledged.
        if is_fenced(self.store, self.epoch):
            raise FencedError(f"epoch {self.epoch + 1} was opened: this controller stops")


def _create(store: Store, key: str, data: bytes) -> None:
    try:
        store.create(key, data)
    except ExistsError:
        # A create whose reply was lost took effect; anything else is another writer.
        if store.get(key) != data:
            raise FencedError(f"{store.url}/{key}: another controller writes here") from None


class RecoveredJournal(NamedTuple):
    """Records that earlier epochs left."""

    epoch: int
    """Epoch of the newest record; 0 for an empty journal."""
    last_sequence: int
    """Sequence of the newest record; 0 for an empty journal."""
    records: list[journal_pb2.JournalRecord]
    """In order, from the requested sequence on; those in parts are joined."""


class _EpochRange(NamedTuple):
    """The accepted part of one epoch's log."""

    epoch: int
    firsts: list[int]
    """First sequences of its segments, ascending."""
    last: int | None
    """Last accepted sequence, as the next epoch's OPEN names it; None for the newest epoch."""


class JournalEnd(NamedTuple):
    """The last accepted record."""

    epoch: int
    """0 for an empty journal."""
    sequence: int


def newest_open_record(store: Store, *, run_uid: str) -> journal_pb2.JournalOpen | None:
    """Read the opening record of the newest epoch; None for an empty journal.

    Raises:
        CorruptError: its first segment is damaged, or of another run.
    """
    listing = _listing(store)
    if not listing:
        return None
    epoch = max(listing)
    return _read_open_record(store, run_uid, epoch, min(listing[epoch]))


def recover_records(
    store: Store, *, run_uid: str, before_epoch: int, since: int, upto: JournalEnd | None = None
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
    listing = _listing(store)
    newest = max((epoch for epoch in listing if epoch < before_epoch), default=0)
    stretches: list[_EpochRange] = []
    epoch: int = newest
    last: int | None = None
    if upto is not None:
        epoch, last = newest, _ = upto
    while epoch:
        firsts = sorted(f for f in listing.get(epoch, []) if last is None or f <= last)
        if not firsts:
            raise CorruptError(f"{store.url}/{JOURNAL}{epoch:06d}/ has no segment up to {last}")
        stretches.append(_EpochRange(epoch, firsts, last))
        if firsts[0] <= since:
            break
        opened = _read_open_record(store, run_uid, epoch, firsts[0])
        epoch, last = opened.previous_epoch, opened.previous_sequence
    records: list[journal_pb2.JournalRecord] = []
    end = 0
    for stretch in reversed(stretches):
        for segment in _segments(store, run_uid, stretch, since):
            end = _check_follows(segment, stretch, end, store)
            records += [r for r in segment.records if since <= r.sequence <= end]
    return RecoveredJournal(newest, end, list(join_parts(records)))


def _listing(store: Store) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for info in store.list(JOURNAL):
        parts = info.key.removeprefix(JOURNAL).removesuffix(".wal").split("/")
        if len(parts) == 2 and all(part.isascii() and part.isdigit() for part in parts):
            found.setdefault(int(parts[0]), []).append(int(parts[1]))
    return found


def _read_open_record(
    store: Store, run_uid: str, epoch: int, first: int
) -> journal_pb2.JournalOpen:
    record = _read(store, run_uid, epoch, first).records[0]
    if record.WhichOneof("body") != "open" or record.open.epoch != epoch:
        raise CorruptError(f"{store.url}/{segment_key(epoch, first)} does not open its epoch")
    if record.open.previous_epoch >= epoch:
        raise CorruptError(f"{store.url}/{segment_key(epoch, first)}: previous epoch is not older")
    return record.open


def _segments(
    store: Store, run_uid: str, stretch: _EpochRange, since: int
) -> Iterator[segments.Segment]:
    # The last segment is read in any case: it says where the epoch ends.
    for first, following in zip(stretch.firsts, [*stretch.firsts[1:], None], strict=True):
        if following is None or following > since:
            yield _read(store, run_uid, stretch.epoch, first)


def _read(store: Store, run_uid: str, epoch: int, first: int) -> segments.Segment:
    key = segment_key(epoch, first)
    where = f"{store.url}/{key}"
    segment = segments.decode_segment(store.get(key), where=where)
    if (segment.epoch, segment.first) != (epoch, first):
        raise CorruptError(f"{where} holds epoch {segment.epoch} from record {segment.first}")
    if segment.run_uid != run_uid:
        raise CorruptError(f"{where} belongs to run {segment.run_uid}, not to {run_uid}")
    return segment


def _check_follows(segment: segments.Segment, stretch: _EpochRange, end: int, store: Store) -> int:
    """Check that a segment follows the last one; return the end of the log after it.

    A run that was restored to a checkpoint continues from the middle of a segment.

    Raises:
        CorruptError: it does not follow.
    """
    where = f"{store.url}/{segment_key(segment.epoch, segment.first)}"
    if end and segment.first != end + 1:
        raise CorruptError(f"{where}: records {end + 1} to {segment.first - 1} are missing")
    return segment.last if stretch.last is None else min(segment.last, stretch.last)
