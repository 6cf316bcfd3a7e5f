"""Journal records in parts: one that is too large for a segment is written as several."""

from collections.abc import Iterable, Iterator

from google.protobuf.message import DecodeError

from etude.common.errors import CorruptError
from etude.v1 import journal_pb2

PART_BYTES = 8 << 20
"""Largest record that is written whole, and size of a part: a segment takes 16 MiB."""


def split_record(record: journal_pb2.JournalRecord) -> Iterator[journal_pb2.JournalRecord]:
    """Split a record into parts without sequences; a small one stays as it is."""
    if record.ByteSize() <= PART_BYTES:
        yield record
        return
    data = record.SerializeToString()
    count = -(-len(data) // PART_BYTES)
    for number in range(count):
        piece = data[number * PART_BYTES : (number + 1) * PART_BYTES]
        part = journal_pb2.JournalPart(number=number, count=count, data=piece)
        yield journal_pb2.JournalRecord(part=part)


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
