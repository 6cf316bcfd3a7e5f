"""Schemas of the tables: pseudonyms, names, times and numbers; never what a user wrote.

Texts stay in the ledger, where they are encrypted with the keys of their users. Times are UTC.
"""

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

Row = Mapping[str, Any]

_TIME = pa.timestamp("us")
_USER = (("tenant", pa.string()), ("user", pa.string()))

EVENTS = pa.schema(
    [
        ("sequence", pa.int64()),
        ("received_at", _TIME),
        *_USER,
        ("kind", pa.string()),
        ("rollout", pa.string()),
        ("conversation", pa.string()),
        ("source", pa.string()),
        ("policy_version", pa.string()),
        ("experiment", pa.string()),
        ("arm", pa.string()),
        # Figures of payloads; null where a kind has none.
        ("turn", pa.int64()),
        ("edit", pa.string()),
        ("language", pa.string()),
        ("num_lines", pa.int64()),
        ("num_alive_lines", pa.int64()),
        ("is_file_seen", pa.bool_()),
        ("age_s", pa.float64()),
        ("after_s", pa.float64()),
        ("is_positive", pa.bool_()),
        ("category", pa.string()),
        ("num_passed", pa.int64()),
        ("num_failed", pa.int64()),
        ("num_errored", pa.int64()),
        ("outcome", pa.string()),
        ("wall_s", pa.float64()),
        ("num_tool_calls", pa.int64()),
        ("num_broken_tool_calls", pa.int64()),
        ("name", pa.string()),
        ("score", pa.float64()),
    ]
)
CONSENTS = pa.schema(
    [
        ("sequence", pa.int64()),
        ("received_at", _TIME),
        *_USER,
        ("granted", pa.bool_()),
        ("terms", pa.string()),
        ("decided_at", _TIME),
    ]
)
OUTCOMES = pa.schema(
    [
        ("started_at", _TIME),
        *_USER,
        ("rollout", pa.string()),
        ("epoch", pa.int64()),
        ("version", pa.int64()),
        ("experiment", pa.string()),
        ("arm", pa.string()),
        ("signal", pa.string()),
        ("numerator", pa.float64()),
        ("denominator", pa.float64()),
        ("state", pa.string()),
    ]
)
WINDOWS = pa.schema(
    [
        ("window", pa.int64()),
        ("closed_at", _TIME),
        ("opened_at", _TIME),
        ("run_uid", pa.string()),
        ("epoch", pa.int64()),
        ("version", pa.int64()),
        ("num_rollouts", pa.int64()),
        ("num_exclusions", pa.int64()),
        ("is_frozen", pa.bool_()),
        ("findings", pa.list_(pa.string())),
    ]
)
WINDOW_ROLLOUTS = pa.schema(
    [
        ("window", pa.int64()),
        ("closed_at", _TIME),
        *_USER,
        ("rollout", pa.string()),
        # Why a rollout is not trained; empty for the others.
        ("exclusion", pa.string()),
        ("stratum", pa.string()),
        ("reward", pa.float64()),
        ("advantage", pa.float64()),
        ("terms", pa.string()),
        ("calls", pa.int64()),
        ("broken_calls", pa.int64()),
        ("edits", pa.int64()),
        ("is_question", pa.bool_()),
        ("tokens", pa.int64()),
    ]
)
