"""Journal records in the segments of a durable log."""

from typing import NamedTuple

from google.protobuf.message import DecodeError

from etude.common.durable_log import LogRecord, encode_frame
from etude.common.durable_log import segments as log_segments
from etude.common.errors import CorruptError
from etude.v1 import journal_pb2


class JournalSegment(NamedTuple):
    """Content of one object of the journal."""

    run_uid: str
    epoch: int
    records: list[journal_pb2.JournalRecord]

    @property
    def first(self) -> int:
        return self.records[0].sequence

    @property
    def last(self) -> int:
        return self.records[-1].sequence


def encode_record(record: journal_pb2.JournalRecord) -> bytes:
    """Encode one record with its frame.

    Raises:
        ValueError: the record has no body, or is larger than a segment may be.
    """
    kind = record.WhichOneof("body")
    if kind is None:
        raise ValueError("a journal record needs a body")
    number = record.DESCRIPTOR.fields_by_name[kind].number
    return encode_frame(number, record.sequence, record.SerializeToString())


def decode_segment(data: bytes, *, where: str) -> JournalSegment:
    """Decode and verify all records of a segment.

    Raises:
        CorruptError: naming the object and the place in it.
    """
    segment = log_segments.decode_segment(data, where=where)
    records = [parse_record(record, where) for record in segment.records]
    return JournalSegment(segment.owner, segment.epoch, records)


def parse_record(framed: LogRecord, where: str) -> journal_pb2.JournalRecord:
    """Parse a record of the log.

    Raises:
        CorruptError: it is no journal record, or its frame says something else.
    """
    record = journal_pb2.JournalRecord()
    try:
        record.ParseFromString(bytes(framed.payload))
    except DecodeError as cause:
        raise CorruptError(f"{where}: record {framed.sequence}: {cause}") from cause
    body = record.WhichOneof("body")
    if (
        body is None
        or record.DESCRIPTOR.fields_by_name[body].number != framed.kind
        or record.sequence != framed.sequence
    ):
        raise CorruptError(f"{where}: record {framed.sequence}: frame and content disagree")
    return record
