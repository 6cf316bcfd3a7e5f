"""Records of the ledger in the frames of a durable log, each chained to the one before.

    payload    chain (32 bytes) | FeedbackRecord
    chain      SHA-256(chain of the record before | FeedbackRecord); the first follows 32 zeros

An altered, removed or inserted record breaks the chain of all records behind it.
"""

from hashlib import sha256
from typing import NamedTuple

from google.protobuf.message import DecodeError

from etude.common.durable_log import LogOpening, LogRecord, encode_frame
from etude.common.errors import CorruptError
from etude.v1 import feedback_ledger_pb2 as pb

CHAIN_BYTES = 32
FIRST_CHAIN = bytes(CHAIN_BYTES)


class ChainedRecord(NamedTuple):
    """A record with its place in the ledger."""

    sequence: int
    chain: bytes
    body: pb.FeedbackRecord


class ChainedFrame(NamedTuple):
    """A framed record, and the chain that the next one continues."""

    frame: bytes
    chain: bytes


def encode_record(sequence: int, body: pb.FeedbackRecord, *, previous: bytes) -> ChainedFrame:
    """Frame a record behind the one with this chain.

    Raises:
        ValueError: the record has no body, or is larger than a segment may be.
    """
    kind = body.WhichOneof("body")
    if kind is None:
        raise ValueError("a record of the ledger needs a body")
    data = body.SerializeToString()
    chain = next_chain(previous, data)
    number = body.DESCRIPTOR.fields_by_name[kind].number
    return ChainedFrame(encode_frame(number, sequence, chain + data), chain)


def parse_record(framed: LogRecord, where: str) -> ChainedRecord:
    """Parse a record, without regard to the one before.

    Raises:
        CorruptError: it is no record of a ledger.
    """
    payload = bytes(framed.payload)
    body = pb.FeedbackRecord()
    try:
        body.ParseFromString(payload[CHAIN_BYTES:])
    except DecodeError as cause:
        raise CorruptError(f"{where}: record {framed.sequence}: {cause}") from cause
    kind = body.WhichOneof("body")
    if kind is None or body.DESCRIPTOR.fields_by_name[kind].number != framed.kind:
        raise CorruptError(f"{where}: record {framed.sequence}: frame and content disagree")
    return ChainedRecord(framed.sequence, payload[:CHAIN_BYTES], body)


def check_chain(framed: LogRecord, where: str, *, previous: bytes) -> bytes:
    """Check that a record follows the one with this chain; return its own.

    Raises:
        CorruptError: it was altered, or one before it is missing.
    """
    chain, data = bytes(framed.payload[:CHAIN_BYTES]), bytes(framed.payload[CHAIN_BYTES:])
    if chain != next_chain(previous, data):
        raise CorruptError(f"{where}: record {framed.sequence} does not continue the chain")
    return chain


def next_chain(previous: bytes, data: bytes) -> bytes:
    """Chain of a record behind the one with this chain."""
    return sha256(previous + data).digest()


def parse_opening(framed: LogRecord, where: str) -> LogOpening | None:
    """Opening of an epoch; None for another record."""
    body = parse_record(framed, where).body
    if body.WhichOneof("body") != "open":
        return None
    opening = body.open
    return LogOpening(opening.epoch, opening.previous_epoch, opening.previous_sequence)
