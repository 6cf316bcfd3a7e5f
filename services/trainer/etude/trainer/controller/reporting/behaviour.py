"""Behaviour in tool calls: reads before edits, tests after edits."""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from posixpath import normpath
from typing import NamedTuple

from etude.common.evaluation.rollout_metrics import EDITS, edited_paths
from etude.v1 import rollout_pb2

READS = frozenset({"read_file"})
TERMINAL = "run_terminal"

_TEST_COMMAND = re.compile(r"\b(pytest|unittest|minitest)\b")
_TEST_FAILED = re.compile(r"^FAILED\b|\b[1-9][0-9]* (failed|error)", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Behaviour:
    """Behaviour of a set of rollouts; a share is None without a denominator."""

    rollouts: int
    with_edit: int
    """Rollouts with at least one edit call, whether or not it applied."""
    read_before_edit: float | None
    """Of those with an edit: the first edit comes in a later turn than a read of that file."""
    tests_after_edit: float | None
    """Of those with an edit: tests run after the last edit."""
    edits_after_failed_test: float | None
    """Of those whose tests failed after an edit: another edit follows."""
    edit_error_rate: float | None
    """Of all edit calls: refused by the tool."""
    malformed_per_rollout: float


SEARCHES = frozenset({"grep", "glob", "codebase_search", "list_dir"})
TRAJECTORY_FIGURES = ("calls_per_turn", "tool_error_rate", "edit_rate", "looks_before_edit")
TOKEN_KINDS = ("thinking", "call", "final_message", "summary", "tool_output")


def trajectory_figures(rollouts: Sequence[Sequence[rollout_pb2.CallRecord]]) -> dict[str, float]:
    """Means of a step's rollouts, each given as its calls in order, for its row.

    A figure without a denominator is left out: of rollouts without a call, or without an edit.
    """
    calls = [[call for call in each if not call.is_malformed] for each in rollouts]
    turns = sum(len({call.turn for call in each}) for each in calls)
    total = sum(map(len, calls))
    edited = [each for each in calls if any(call.name in EDITS for call in each)]
    looks = sum(_looks_before_edit(each) for each in edited)
    shares = {
        "calls_per_turn": (total, turns),
        "tool_error_rate": (sum(call.is_error for each in calls for call in each), total),
        "edit_rate": (len(edited), len(calls)),
        "looks_before_edit": (looks, len(edited)),
    }
    return {name: round(part / whole, 4) for name, (part, whole) in shares.items() if whole}


def token_sums(costs: Iterable[rollout_pb2.Costs]) -> dict[str, int]:
    """Tokens of rollouts by kind; all but those of tool output were sampled."""
    sums = dict.fromkeys(TOKEN_KINDS, 0)
    for each in costs:
        sampled = {
            "thinking": each.thinking_tokens,
            "final_message": each.final_message_tokens,
            "summary": each.summary_tokens,
        }
        sampled["call"] = each.completion_tokens - sum(sampled.values())
        for kind, tokens in ({"tool_output": each.tool_output_tokens} | sampled).items():
            sums[kind] += tokens
    return sums


def _looks_before_edit(calls: Sequence[rollout_pb2.CallRecord]) -> int:
    """Number of reads and searches in turns before that of the first edit."""
    first = next(call.turn for call in calls if call.name in EDITS)
    return sum(call.turn < first and call.name in READS | SEARCHES for call in calls)


class _Habits(NamedTuple):
    """Behaviour of one rollout; None if a question does not apply."""

    edits: int
    failed_edits: int
    read_before_edit: bool | None
    tests_after_edit: bool | None
    edits_after_failed_test: bool | None
    malformed: int


def behaviour(rollouts: Iterable[Sequence[rollout_pb2.CallRecord]]) -> Behaviour:
    """Summarise rollouts, each given as its calls in order."""
    habits = [_habits(calls) for calls in rollouts]
    edits = sum(h.edits for h in habits)
    return Behaviour(
        rollouts=len(habits),
        with_edit=sum(h.edits > 0 for h in habits),
        read_before_edit=_share(h.read_before_edit for h in habits),
        tests_after_edit=_share(h.tests_after_edit for h in habits),
        edits_after_failed_test=_share(h.edits_after_failed_test for h in habits),
        edit_error_rate=sum(h.failed_edits for h in habits) / edits if edits else None,
        malformed_per_rollout=sum(h.malformed for h in habits) / max(1, len(habits)),
    )


def _share(answers: Iterable[bool | None]) -> float | None:
    known = [answer for answer in answers if answer is not None]
    return sum(known) / len(known) if known else None


def _habits(calls: Sequence[rollout_pb2.CallRecord]) -> _Habits:
    sound = [call for call in calls if not call.is_malformed]
    edits = [place for place, call in enumerate(sound) if call.name in EDITS]
    malformed = len(calls) - len(sound)
    if not edits:
        return _Habits(0, 0, None, None, None, malformed)
    first = sound[edits[0]]
    paths = edited_paths(first)
    tests = [place for place, call in enumerate(sound) if _runs_tests(call)]
    failed = [p for p in tests if p > edits[0] and _TEST_FAILED.search(sound[p].result)]
    return _Habits(
        edits=len(edits),
        failed_edits=sum(sound[place].is_error for place in edits),
        # Calls of one turn are written before any of them is answered: a read beside the edit
        # informed nothing.
        read_before_edit=any(
            call.name in READS
            and call.turn < first.turn
            and normpath(_argument(call, "path")) in paths
            for call in sound
        ),
        tests_after_edit=any(place > edits[-1] for place in tests),
        edits_after_failed_test=edits[-1] > failed[0] if failed else None,
        malformed=malformed,
    )


def _runs_tests(call: rollout_pb2.CallRecord) -> bool:
    return call.name == TERMINAL and bool(_TEST_COMMAND.search(_argument(call, "command")))


def _argument(call: rollout_pb2.CallRecord, name: str) -> str:
    try:
        arguments = json.loads(call.arguments_json or "{}")
    except ValueError:
        return ""
    value = arguments.get(name, "") if isinstance(arguments, dict) else ""
    return value.strip() if isinstance(value, str) else ""
