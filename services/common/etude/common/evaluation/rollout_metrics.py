"""Metrics of one rollout other than its reward: edits without evidence, cost, latency."""

import itertools
import json
import posixpath
import re
from collections.abc import Sequence
from dataclasses import dataclass

from etude.v1 import rollout_pb2

EDITS = frozenset({"search_replace", "write_file", "delete_file", "apply_patch"})
_NAMES_ONLY = frozenset({"list_dir", "glob", "todo_write"})
"""Tools whose results show no content of a file."""
_PATCHED = re.compile(r"^--- (?:a/)?([^\t\n]+)", re.MULTILINE)
_CREATED = "Created "
"""Beginning of the answer of write_file where no file was."""
_MAX_PATHS = 64
"""Of one patch that are counted."""
_MAX_CHARS = 4096
"""Of arguments and results that are searched: a policy decides how long they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPrices:
    """Prices per million tokens, in any currency."""

    read: float
    sampled: float


def edits_without_evidence(calls: Sequence[rollout_pb2.CallRecord]) -> int:
    """Number of files edited without having seen them, each counted once for every edit.

    A file is seen if a call of an earlier turn, no edit, names it or shows lines of it: it was
    read, found by a search, printed by a command or in its traceback. A file that the rollout
    created needs none. Of a result the record holds the first 4 KiB, and so much counts.

    Calls of one turn are written before any of them is answered: a read with an edit informed
    nothing. Refused edits count too.
    """
    sound = [call for call in calls if not call.is_malformed]
    created: set[str] = set()
    count = 0
    for call in sound:
        if call.name not in EDITS:
            continue
        paths = edited_paths(call)
        if call.name == "write_file" and call.result.startswith(_CREATED):
            created.update(paths)
        count += sum(path not in created and not _is_seen(path, call.turn, sound) for path in paths)
    return count


def token_cost(costs: rollout_pb2.Costs, prices: TokenPrices) -> float:
    """Cost of a rollout's tokens, each read once: engines keep the prefixes of a conversation."""
    read = costs.prompt_tokens + costs.tool_output_tokens
    return (read * prices.read + costs.completion_tokens * prices.sampled) / 1e6


def latency_s(costs: rollout_pb2.Costs) -> float:
    """Seconds that a user waits for a rollout: for tokens and for tools."""
    return costs.token_seconds + costs.tool_seconds


def edited_paths(call: rollout_pb2.CallRecord) -> set[str]:
    """Files that a call edits; of a patch the first ones that exist."""
    try:
        arguments = json.loads(call.arguments_json or "{}")
    except (ValueError, RecursionError):
        return set()
    if not isinstance(arguments, dict):
        return set()
    if call.name == "apply_patch":
        matches = _PATCHED.finditer(str(arguments.get("patch", "")))
        paths = [match[1] for match in itertools.islice(matches, _MAX_PATHS)]
    else:
        paths = [str(arguments.get("path", ""))]
    return {posixpath.normpath(path.strip()) for path in paths if path.strip()} - {"/dev/null"}


def _is_seen(path: str, turn: int, calls: Sequence[rollout_pb2.CallRecord]) -> bool:
    """True if a call of an earlier turn named a file or showed lines of it."""
    return any(
        _names(path, call.arguments_json[:_MAX_CHARS]) or _names(path, call.result[:_MAX_CHARS])
        for call in calls
        if call.turn < turn and call.name not in EDITS | _NAMES_ONLY and not call.is_error
    )


def _names(path: str, text: str) -> bool:
    # Most texts do not hold the path, and compiling a pattern takes longer than to see that.
    return path in text and bool(re.search(rf"(?<![\w.-]){re.escape(path)}(?![\w/-])", text))
