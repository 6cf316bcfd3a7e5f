"""Sanitizing of a controller's reports, which come from an image of the user's choice."""

import math
from contextlib import suppress
from itertools import islice

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from etude.v1 import run_pb2


def parse_finite(text: str) -> float | None:
    """The number in a text; None if it is not a finite number."""
    with suppress(ValueError):
        value = float(text)
        return value if math.isfinite(value) else None
    return None


MAX_INTEGER = 2**53 - 1
"""Largest integer that every JSON reader keeps exact."""
MAX_UNIX_MS = 253_402_300_799_000
"""The end of the year 9999, the last date."""

FIGURES = {"reward_mean", "reward_ewma", "tokens_per_second", "eval_success", "loss", "mismatch"}
"""Doubles that are only shown, and omitted if not finite; every other double is an amount."""
MAX_LENGTHS = {"phase": 63, "reason": 64, "message": 1024}
MAX_METRIC_LENGTH, MAX_METRICS = 64, 32
"""Limits of the schema of Checkpoints."""
GATES = {"Pending", "Met", "NotMet"}
"""States of a phase's gate; a phase without a gate has none."""

_INTEGERS = {FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_INT64}


def sanitize_status(report: run_pb2.RunStatus) -> run_pb2.RunStatus:
    """The status with impossible amounts as zero and with texts cut to length.

    A status that the API server rejects would block the run's suspension, deadlines and budget.
    """
    sanitized = run_pb2.RunStatus()
    sanitized.CopyFrom(report)
    _clean(sanitized)
    sanitized.last_step_unix_ms = min(sanitized.last_step_unix_ms, MAX_UNIX_MS)
    for phase in sanitized.phases:
        phase.gate = phase.gate if phase.gate in GATES else ""
    return sanitized


def sanitize_checkpoint(report: run_pb2.CheckpointRecord) -> run_pb2.CheckpointRecord:
    """The record with impossible amounts as zero and without invalid metrics.

    A record that the API server rejects would block all later reports.
    """
    sanitized = run_pb2.CheckpointRecord()
    sanitized.CopyFrom(report)
    sanitized.ClearField("metrics")
    _clean(sanitized)
    kept = (name for name in sorted(report.metrics) if _is_figure(name, report.metrics[name]))
    for name in islice(kept, MAX_METRICS):
        sanitized.metrics[name] = report.metrics[name]
    return sanitized


def _is_figure(name: str, text: str) -> bool:
    return max(len(name), len(text)) <= MAX_METRIC_LENGTH and parse_finite(text) is not None


def _clean(message: Message) -> None:
    for field, value in message.ListFields():
        if field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
            for each in value if field.is_repeated else (value,):
                _clean(each)
        elif field.cpp_type in _INTEGERS:
            setattr(message, field.name, min(max(0, value), MAX_INTEGER))
        elif field.name not in FIGURES and field.cpp_type == FieldDescriptor.CPPTYPE_DOUBLE:
            setattr(message, field.name, value if math.isfinite(value) and value >= 0 else 0.0)
        elif field.name in MAX_LENGTHS:
            setattr(message, field.name, value[: MAX_LENGTHS[field.name]])
