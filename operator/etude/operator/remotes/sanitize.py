"""Sanitizing of a controller's reports, which come from an image of the user's choice."""

import math
from contextlib import suppress
from itertools import islice

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from etude.v1 import run_pb2


def value_of(text: str) -> float | None:
    """The number in a text; None if it is not a finite number."""
    with suppress(ValueError):
        value = float(text)
        return value if math.isfinite(value) else None
    return None


LARGEST = 2**53 - 1
"""Largest integer that every JSON reader keeps exact."""
LAST_MS = 253_402_300_799_000
"""The end of the year 9999, the last date."""

FIGURES = {"reward_mean", "reward_ewma", "tokens_per_second", "eval_success", "loss", "mismatch"}
"""Doubles that are only shown, and omitted if not finite; every other double is an amount."""
LONGEST = {"phase": 63, "reason": 64, "message": 1024}
LONGEST_FIGURE, MOST_FIGURES = 64, 32
"""Limits of the schema of Checkpoints."""
GATES = {"Pending", "Met", "NotMet"}
"""States of a phase's gate; a phase without a gate has none."""

_INTEGERS = {FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_INT64}


def plausible(said: run_pb2.RunStatus) -> run_pb2.RunStatus:
    """The status with impossible amounts as zero and with texts cut to length.

    A status that the API server rejects would block the run's suspension, deadlines and budget.
    """
    found = run_pb2.RunStatus()
    found.CopyFrom(said)
    _clean(found)
    found.last_step_unix_ms = min(found.last_step_unix_ms, LAST_MS)
    for phase in found.phases:
        phase.gate = phase.gate if phase.gate in GATES else ""
    return found


def plausible_record(said: run_pb2.CheckpointRecord) -> run_pb2.CheckpointRecord:
    """The record with impossible amounts as zero and without invalid metrics.

    A record that the API server rejects would block all later reports.
    """
    found = run_pb2.CheckpointRecord()
    found.CopyFrom(said)
    found.ClearField("metrics")
    _clean(found)
    kept = (name for name in sorted(said.metrics) if _is_figure(name, said.metrics[name]))
    for name in islice(kept, MOST_FIGURES):
        found.metrics[name] = said.metrics[name]
    return found


def _is_figure(name: str, text: str) -> bool:
    return max(len(name), len(text)) <= LONGEST_FIGURE and value_of(text) is not None


def _clean(message: Message) -> None:
    for field, value in message.ListFields():
        if field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
            for each in value if field.is_repeated else (value,):
                _clean(each)
        elif field.cpp_type in _INTEGERS:
            setattr(message, field.name, min(max(0, value), LARGEST))
        elif field.name not in FIGURES and field.cpp_type == FieldDescriptor.CPPTYPE_DOUBLE:
            setattr(message, field.name, value if math.isfinite(value) and value >= 0 else 0.0)
        elif field.name in LONGEST:
            setattr(message, field.name, value[: LONGEST[field.name]])
