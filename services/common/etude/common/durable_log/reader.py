"""Reader of a durable log: the records of all epochs that their successors accepted."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Self

from etude.common.blobs import Store
from etude.common.durable_log import segments
from etude.common.durable_log.log import segment_key
from etude.common.durable_log.segments import LogRecord
from etude.common.errors import CorruptError


class LogOpening(NamedTuple):
    """First record of an epoch: the last accepted record of the epoch before."""

    epoch: int
    previous_epoch: int
    """0 if the log was empty."""
    previous_sequence: int


class LogEnd(NamedTuple):
    """The last accepted record."""

    epoch: int
    """0 for an empty log."""
    sequence: int


class LogSource(NamedTuple):
    """Place and format of a log."""

    store: Store
    prefix: str
    """Of its keys; ends with a slash."""
    owner: str
    """Records of another owner are refused."""
    parse_opening: Callable[[LogRecord, str], LogOpening | None]
    """Opening of an epoch in a record at a place; None if the record is another."""


class AcceptedSegment(NamedTuple):
    """Accepted records of one segment, as far as they were asked for."""

    records: list[LogRecord]
    end: int
    """Last accepted sequence of the segment, also if its record was not asked for."""
    where: str
    """URL of the segment."""


class _EpochRange(NamedTuple):
    """The accepted part of one epoch's log."""

    epoch: int
    firsts: list[int]
    """First sequences of its segments, ascending."""
    last: int | None
    """Last accepted sequence, as the next epoch's opening names it; None for the newest epoch."""


@dataclass(frozen=True, slots=True)
class LogReader:
    """Segments of a log, as they were listed once."""

    source: LogSource
    firsts: Mapping[int, list[int]]
    """First sequences of the segments of each epoch."""

    @classmethod
    def read_listing(cls, source: LogSource, *, after: str = "") -> Self:
        """List a log. A writer claims its epoch before, so that nothing acknowledged is missed.

        Args:
            source: the log.
            after: key of a segment: only those behind it are listed, for who has read the others.
        """
        firsts: dict[int, list[int]] = {}
        for info in source.store.list(source.prefix, after=after):
            parts = info.key.removeprefix(source.prefix).removesuffix(".wal").split("/")
            if len(parts) == 2 and all(part.isascii() and part.isdigit() for part in parts):
                firsts.setdefault(int(parts[0]), []).append(int(parts[1]))
        return cls(source, firsts)

    def newest_epoch(self, *, before: int | None = None) -> int:
        """Newest epoch that has records, perhaps below another one; 0 for none."""
        return max((e for e in self.firsts if before is None or e < before), default=0)

    def read_first_record(self, epoch: int) -> LogRecord:
        """Read the record that opens an epoch.

        Raises:
            CorruptError: the segment is damaged, of another owner, or does not open the epoch.
        """
        record, _ = self._read_opening(epoch, min(self.firsts[epoch]))
        return record

    def accepted_segments(
        self, *, before_epoch: int | None = None, since: int = 0, upto: LogEnd | None = None
    ) -> Iterator[AcceptedSegment]:
        """Read the accepted records in order, one segment in memory at a time.

        Args:
            before_epoch: only records of older epochs: of what the caller claimed, or of all.
            since: first sequence of interest.
            upto: the last accepted record, if not the newest.

        Raises:
            CorruptError: a segment is damaged, missing, or of another owner.
        """
        end = 0
        for part in self._accepted_ranges(before_epoch, since, upto):
            # The last segment is read in any case: it says where the epoch ends.
            for first, following in zip(part.firsts, [*part.firsts[1:], None], strict=True):
                if following is not None and following <= since:
                    continue
                segment = self._read(part.epoch, first)
                end = self._check_follows(segment, part, end)
                records = [r for r in segment.records if since <= r.sequence <= end]
                yield AcceptedSegment(records, end, self._where(part.epoch, first))

    def _accepted_ranges(
        self, before_epoch: int | None, since: int, upto: LogEnd | None
    ) -> list[_EpochRange]:
        ranges: list[_EpochRange] = []
        epoch: int = self.newest_epoch(before=before_epoch)
        last: int | None = None
        if upto is not None:
            epoch, last = upto
        while epoch:
            firsts = sorted(f for f in self.firsts.get(epoch, []) if last is None or f <= last)
            if not firsts:
                url, prefix = self.source.store.url, self.source.prefix
                raise CorruptError(f"{url}/{prefix}{epoch:06d}/ has no segment up to {last}")
            ranges.append(_EpochRange(epoch, firsts, last))
            if firsts[0] <= since:
                break
            _, opening = self._read_opening(epoch, firsts[0])
            epoch, last = opening.previous_epoch, opening.previous_sequence
        return ranges[::-1]

    def _read_opening(self, epoch: int, first: int) -> tuple[LogRecord, LogOpening]:
        where = self._where(epoch, first)
        record = self._read(epoch, first).records[0]
        opening = self.source.parse_opening(record, where)
        if opening is None or opening.epoch != epoch:
            raise CorruptError(f"{where} does not open its epoch")
        if opening.previous_epoch >= epoch:
            raise CorruptError(f"{where}: previous epoch is not older")
        return record, opening

    def _read(self, epoch: int, first: int) -> segments.Segment:
        where, owner = self._where(epoch, first), self.source.owner
        key = segment_key(self.source.prefix, epoch, first)
        segment = segments.decode_segment(self.source.store.get(key), where=where)
        if (segment.epoch, segment.first) != (epoch, first):
            raise CorruptError(f"{where} holds epoch {segment.epoch} from record {segment.first}")
        if segment.owner != owner:
            raise CorruptError(f"{where} belongs to {segment.owner}, not to {owner}")
        return segment

    def _check_follows(self, segment: segments.Segment, part: _EpochRange, end: int) -> int:
        """Check that a segment follows the last one; return the end of the log after it.

        A log that was cut goes on from the middle of a segment.

        Raises:
            CorruptError: it does not follow.
        """
        if end and segment.first != end + 1:
            where = self._where(segment.epoch, segment.first)
            raise CorruptError(f"{where}: records {end + 1} to {segment.first - 1} are missing")
        return segment.last if part.last is None else min(segment.last, part.last)

    def _where(self, epoch: int, first: int) -> str:
        return f"{self.source.store.url}/{segment_key(self.source.prefix, epoch, first)}"
