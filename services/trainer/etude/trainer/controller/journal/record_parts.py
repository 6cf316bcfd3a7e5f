"""Journal records in parts: one that is too large for a segment is written as several."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from google.protobuf.message import DecodeError

from etude.common.errors import CorruptError
from etude.trainer.controller.journal import segments
from etude.v1 import journal_pb2

PART_BYTES = 8 << 20
"""Largest record that is written whole, and size of a part: a segment takes 16 MiB."""


class PreparedRecord(NamedTuple):
    """A record that is ready to be journaled."""

    record: journal_pb2.JournalRecord
    data: bytes | None
    """Its serialised form, if it is written in parts."""


def prepare_record(record: journal_pb2.JournalRecord) -> PreparedRecord:
    """Serialise a record that is written in parts.

    This takes time in proportion to its size: do it in a thread where records may be large.
    """
    data = record.SerializeToString()
    return PreparedRecord(record, data if len(data) > PART_BYTES else None)


_PART_HEADER_BYTES = 64
"""At most so many are added to the data of a part."""


class RecordPart(NamedTuple):
    """A part of a large record, framed in the thread that writes it; shares the record's memory."""

    number: int
    num_parts: int
    data: memoryview

    @property
    def num_bytes(self) -> int:
        """Upper bound of the size of its frame."""
        return len(self.data) + _PART_HEADER_BYTES

    def encode(self, sequence: int) -> bytes:
        """The part as a framed record of its own."""
        return segments.encode_record(self.message(sequence))

    def message(self, sequence: int) -> journal_pb2.JournalRecord:
        """The part as a record of its own."""
        part = journal_pb2.JournalPart(
            number=self.number, count=self.num_parts, data=bytes(self.data)
        )
        return journal_pb2.JournalRecord(sequence=sequence, part=part)


def split_data(data: bytes) -> list[RecordPart]:
    """Split a serialised record into parts."""
    view = memoryview(data)
    num_parts = -(-len(data) // PART_BYTES)
    return [
        RecordPart(number, num_parts, view[number * PART_BYTES : (number + 1) * PART_BYTES])
        for number in range(num_parts)
    ]


def join_parts(
    records: Iterable[journal_pb2.JournalRecord],
) -> Iterator[journal_pb2.JournalRecord]:
    """Join the parts in records that are in order; the whole has the sequence of its last part.

    A record of which the writer died between two parts was never acknowledged: it is left out, as
    are parts whose beginning lies before the first record.

    Raises:
        CorruptError: joined parts are no record.
    """
    parts: list[journal_pb2.JournalPart] = []
    for record in records:
        if record.WhichOneof("body") != "part":
            parts = []
            yield record
            continue
        if record.part.number == 0:
            parts = []
        if record.part.number != len(parts):
            parts = []
            continue
        parts.append(record.part)
        if len(parts) == record.part.count:
            yield _parse_parts(parts, record.sequence)
            parts = []


def _parse_parts(
    parts: Iterable[journal_pb2.JournalPart], sequence: int
) -> journal_pb2.JournalRecord:
    whole = journal_pb2.JournalRecord()
    try:
        whole.ParseFromString(b"".join(part.data for part in parts))
    except DecodeError as cause:
        raise CorruptError(f"the parts up to record {sequence} are no record: {cause}") from cause
    whole.sequence = sequence
    return whole
