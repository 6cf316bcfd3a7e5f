"""Figures of the calls of a rollout, which stand for the calls at the controller. Pure."""

import json
import re
from collections import Counter
from collections.abc import Sequence
from posixpath import normpath

from etude.agent import transcript
from etude.common.evaluation.rollout_metrics import EDITS, edited_paths
from etude.common.monitors.judge_gap import addresses_judge
from etude.v1 import journal_pb2, rollout_content_pb2, rollout_pb2

READS = frozenset({"read_file"})
SEARCHES = frozenset({"grep", "glob", "codebase_search", "list_dir"})
TERMINAL = "run_terminal"

_TEST_COMMAND = re.compile(r"\b(pytest|unittest|minitest)\b")
_TEST_FAILED = re.compile(r"^FAILED\b|\b[1-9][0-9]* (failed|error)", re.MULTILINE)

Calls = Sequence[rollout_pb2.CallRecord]


def call_figures(record: journal_pb2.JournalRollout) -> rollout_content_pb2.CallFigures:
    """Figures of the calls of a rollout, wherever these are."""
    if record.content.HasField("figures"):
        return record.content.figures
    return measure_calls(record.rollout)


def measure_calls(rollout: rollout_pb2.Rollout) -> rollout_content_pb2.CallFigures:
    """Measure the calls of a rollout, which are in order, and its final message."""
    sound = [call for call in rollout.calls if not call.is_malformed]
    found = rollout_content_pb2.CallFigures(
        calls=len(sound),
        errors=sum(call.is_error for call in sound),
        turns=len({call.turn for call in sound}),
        malformed=len(rollout.calls) - len(sound),
        tools=Counter(call.name for call in sound),
        changes=sum(bool(transcript.edits(call)) for call in rollout.calls),
        asks_question=transcript.asks_question(rollout.final_message),
        addresses_judge=addresses_judge(rollout.final_message),
    )
    edits = [place for place, call in enumerate(sound) if call.name in EDITS]
    if edits:
        _measure_edits(found, sound, edits)
    return found


def _measure_edits(
    found: rollout_content_pb2.CallFigures, calls: Calls, edits: Sequence[int]
) -> None:
    """Add the figures of a rollout with edits.

    Args:
        found: gets the figures.
        calls: without malformed ones.
        edits: their places.
    """
    first = calls[edits[0]]
    paths = edited_paths(first)
    tests = [place for place, call in enumerate(calls) if _runs_tests(call)]
    failed = [p for p in tests if p > edits[0] and _TEST_FAILED.search(calls[p].result)]
    # Calls of one turn are written before any of them is answered: a read in the turn of the edit
    # informed nothing.
    before = [call for call in calls if call.turn < first.turn]
    found.edits = len(edits)
    found.failed_edits = sum(calls[place].is_error for place in edits)
    found.looks_before_edit = sum(call.name in READS | SEARCHES for call in before)
    found.has_read_before_edit = any(
        call.name in READS and normpath(_argument(call, "path")) in paths for call in before
    )
    found.has_tests_after_edit = any(place > edits[-1] for place in tests)
    if failed:
        found.has_edits_after_failed_test = edits[-1] > failed[0]


def _runs_tests(call: rollout_pb2.CallRecord) -> bool:
    return call.name == TERMINAL and bool(_TEST_COMMAND.search(_argument(call, "command")))


def _argument(call: rollout_pb2.CallRecord, name: str) -> str:
    try:
        arguments = json.loads(call.arguments_json or "{}")
    except ValueError:
        return ""
    value = arguments.get(name, "") if isinstance(arguments, dict) else ""
    return value.strip() if isinstance(value, str) else ""
