"""Durable log: records appended in order, acknowledged once they are in an object store."""

from etude.common.durable_log.log import (
    DurableLog,
    LazyFrame,
    claim_log_epoch,
    is_log_fenced,
    segment_key,
)
from etude.common.durable_log.reader import (
    AcceptedSegment,
    LogEnd,
    LogOpening,
    LogReader,
    LogSource,
)
from etude.common.durable_log.segments import LogRecord, encode_frame, encode_segment

__all__ = [
    "AcceptedSegment",
    "DurableLog",
    "LazyFrame",
    "LogEnd",
    "LogOpening",
    "LogReader",
    "LogRecord",
    "LogSource",
    "claim_log_epoch",
    "encode_frame",
    "encode_segment",
    "is_log_fenced",
    "segment_key",
]
