"""Byte format of a segment of a durable log.

    segment   header record+ commit
    header    "ETWL" | u16 format | u32 epoch | u64 first sequence | u16 length, owner | u32 crc
    record    u32 length | u32 crc | u8 kind | u64 sequence | payload
    commit    a record of kind 255; its payload: u64 first sequence | u32 count | u32 crc of records

Little-endian; every crc is CRC-32 as in zlib, which the standard library computes at memory speed.
A segment is one create-only object, so it exists completely or not at all: one that does not decode
to its end is damaged and refused. Kind and payload of a record belong to the log's owner.
"""

import struct
import zlib
from collections.abc import Sequence
from typing import NamedTuple

from etude.common.errors import CorruptError

MAGIC = b"ETWL"
FORMAT = 1
COMMIT_KIND = 255
MAX_RECORD_BYTES = 16 << 20

_HEADER = struct.Struct("<4sHIQH")
_RECORD = struct.Struct("<IIBQ")
_COMMIT = struct.Struct("<QII")
_CRC = struct.Struct("<I")


class LogRecord(NamedTuple):
    """One verified record; its payload shares the memory of the segment."""

    kind: int
    sequence: int
    payload: memoryview


class Segment(NamedTuple):
    """Content of one object of a log."""

    owner: str
    """Uid of the run, or of the ledger, that the log belongs to."""
    epoch: int
    records: list[LogRecord]

    @property
    def first(self) -> int:
        return self.records[0].sequence

    @property
    def last(self) -> int:
        return self.records[-1].sequence


def encode_frame(kind: int, sequence: int, payload: bytes) -> bytes:
    """Encode one record with its frame.

    Raises:
        ValueError: the payload is larger than a segment may be.
    """
    if len(payload) > MAX_RECORD_BYTES:
        raise ValueError(f"a record of {len(payload)} bytes exceeds {MAX_RECORD_BYTES}")
    crc = zlib.crc32(payload, zlib.crc32(struct.pack("<BQ", kind, sequence)))
    return _RECORD.pack(len(payload), crc, kind, sequence) + payload


def encode_segment(owner: str, epoch: int, *, first: int, frames: Sequence[bytes]) -> bytes:
    """Encode a segment from framed records with consecutive sequences."""
    name = owner.encode()
    header = _HEADER.pack(MAGIC, FORMAT, epoch, first, len(name)) + name
    body = b"".join(frames)
    commit = _COMMIT.pack(first, len(frames), zlib.crc32(body))
    last = first + len(frames) - 1
    return header + _CRC.pack(zlib.crc32(header)) + body + encode_frame(COMMIT_KIND, last, commit)


def decode_segment(data: bytes, *, where: str) -> Segment:
    """Decode and verify all records of a segment.

    Raises:
        CorruptError: naming the object and the offset.
    """
    view = memoryview(data)
    epoch, first, owner, offset = _decode_header(view, where)
    records: list[LogRecord] = []
    start = offset
    while True:
        kind, sequence, payload, end = _decode_frame(view, offset, where)
        if kind == COMMIT_KIND:
            expected = _COMMIT.pack(first, len(records), zlib.crc32(view[start:offset]))
            if bytes(payload) != expected or end != len(data) or not records:
                raise CorruptError(f"{where}: the commit at byte {offset} does not match")
            return Segment(owner, epoch, records)
        if sequence != first + len(records):
            raise CorruptError(f"{where}: sequence {sequence} at byte {offset} is out of order")
        records.append(LogRecord(kind, sequence, payload))
        offset = end


def _decode_header(view: memoryview, where: str) -> tuple[int, int, str, int]:
    if len(view) < _HEADER.size:
        raise CorruptError(f"{where}: {len(view)} bytes are not a segment of a log")
    magic, version, epoch, first, length = _HEADER.unpack_from(view)
    end = _HEADER.size + length
    if magic != MAGIC or version != FORMAT or len(view) < end + _CRC.size:
        raise CorruptError(f"{where}: not a segment of a log of format {FORMAT}")
    if _CRC.unpack_from(view, end) != (zlib.crc32(view[:end]),):
        raise CorruptError(f"{where}: the header is damaged")
    return epoch, first, bytes(view[_HEADER.size : end]).decode(), end + _CRC.size


def _decode_frame(view: memoryview, offset: int, where: str) -> tuple[int, int, memoryview, int]:
    if offset + _RECORD.size > len(view):
        raise CorruptError(f"{where}: ends at byte {len(view)} without a commit")
    length, crc, kind, sequence = _RECORD.unpack_from(view, offset)
    start = offset + _RECORD.size
    # The length is untrusted until the checksum holds: it must not lead beyond the data.
    if length > MAX_RECORD_BYTES or start + length > len(view):
        raise CorruptError(f"{where}: the record at byte {offset} is damaged")
    payload = view[start : start + length]
    if zlib.crc32(payload, zlib.crc32(struct.pack("<BQ", kind, sequence))) != crc:
        raise CorruptError(f"{where}: the record at byte {offset} is damaged")
    return kind, sequence, payload, start + length
