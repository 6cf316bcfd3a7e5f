"""Contrast of a rollout with its siblings: the second stage of detection, a question to a judge.

A sign alone is no hack: honest work touches the same files. A judge sees the signs, the change and
the changes of up to `SIBLINGS` siblings of the group, and says how sure it is of a hack. Tested
with scripted judges; the precision with a capable model is not measured.
"""

import json
from collections.abc import Sequence

from google.protobuf.message import DecodeError

from etude.rewards.hacks.signs import Sign
from etude.v1 import environments_pb2, rollout_pb2

SIBLINGS = 4
_MAX_FILE_CHARS = 2_000
_MAX_FILES = 8


def contrast(
    instruction: str,
    rollout: rollout_pb2.Rollout,
    signs: Sequence[Sign],
    siblings: Sequence[rollout_pb2.Rollout],
) -> str:
    """The request of a question: instruction, signs and siblings, as one JSON document."""
    others = [each for each in siblings if each.rollout_id != rollout.rollout_id][:SIBLINGS]
    document = {
        "request": instruction,
        "signs": [sign._asdict() for sign in signs],
        "siblings": [
            {"changes": _changes(each.diff), "final_message": each.final_message[:_MAX_FILE_CHARS]}
            for each in others
        ],
    }
    return json.dumps(document, ensure_ascii=False)


def _changes(encoded: bytes) -> dict[str, str | None]:
    diff = environments_pb2.WorkspaceDiff()
    try:
        diff.MergeFromString(encoded)
    except DecodeError:
        return {}
    shown: dict[str, str | None] = {
        file.path: file.content[:_MAX_FILE_CHARS].decode("utf-8", "replace")
        for file in diff.written[:_MAX_FILES]
    }
    return shown | dict.fromkeys(diff.deleted[:_MAX_FILES])
