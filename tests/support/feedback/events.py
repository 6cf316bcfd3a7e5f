"""Feedback events as clients send them."""

import json
from collections.abc import Mapping
from typing import Any

TERMS = "2026-11"
DECIDED = "2026-11-01T08:00:00Z"

PAYLOADS: Mapping[str, Mapping[str, Any]] = {
    "shown": {"turn": 0, "numLines": 12},
    "accepted": {"turn": 1},
    "rejected": {"turn": 1},
    "edit_applied": {
        "turn": 1,
        "edit": "e-1",
        "language": "Python",
        "numLines": 2,
        "lineHashes": ["0123456789abcdef", "fedcba9876543210"],
        "diff": "+import os\n+os.getcwd()\n",
    },
    "edit_observed": {"edit": "e-1", "ageS": 3600.5, "isFileSeen": True, "numAliveLines": 1},
    "followup": {"turn": 1, "text": "no, undo that", "afterS": 12},
    "thumb": {"turn": 1, "isPositive": False},
    "reason": {"turn": 1, "category": "UnwantedChange", "text": "it deleted my tests"},
    "test_result": {"turn": 2, "numPassed": 10, "numFailed": 1},
    "turn_ended": {"turn": 2, "outcome": "BrokenToolCall", "wallS": 2.5, "numToolCalls": 3},
    "task_closed": {"outcome": "Merged"},
    "demonstration": {"turn": 2, "text": "def f() -> int:\n    return 1\n"},
    "annotated": {"name": "helpful", "score": 0.5},
    "dryrun": {"text": "hello"},
}
"""An example for each kind."""


def event(  # noqa: PLR0913 - one for each field that tests vary
    kind: str = "followup",
    *,
    id: str = "1",  # noqa: A002 - the name of the attribute
    tenant: str = "acme",
    user: str = "u-1",
    granted: bool = True,
    terms: str = TERMS,
    decided: str = DECIDED,
    **payload: Any,
) -> dict[str, Any]:
    """One event as JSON; further arguments change its payload."""
    return {
        "specversion": "1.0",
        "id": id,
        "source": "etude-agent/0.1.0",
        "type": f"dev.etude.feedback.{kind}.v1",
        "subject": "conversation-1",
        "time": "2026-11-02T08:00:00Z",
        "data": {
            "tenant": tenant,
            "user": user,
            "rollout": "r-1",
            "policyVersion": "1.12",
            "consent": {"granted": granted, "policyVersion": terms, "at": decided},
            "payload": {**PAYLOADS[kind], **payload},
        },
    }


def encoded(kind: str = "followup", **fields: Any) -> bytes:
    """One event in bytes."""
    return json.dumps(event(kind, **fields)).encode()
