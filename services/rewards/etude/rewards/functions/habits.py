"""Penalty for broken habits: reads before edits, own lints fixed, tests run, to-dos closed."""

import math
from collections.abc import Sequence

from etude.agent import transcript
from etude.common.api.run.rewards import HabitsParameters
from etude.rewards.functions.base import Penalty
from etude.v1 import rollout_pb2

Calls = Sequence[rollout_pb2.CallRecord]


def penalty(
    rollout: rollout_pb2.Rollout, parameters: HabitsParameters, _success: float = 0.0
) -> float:
    """Weighted share of the habits that the rollout broke, from 0 to 1.

    One breach breaks a habit: a mean over files could be diluted by harmless edits.
    """
    calls = rollout.calls
    is_cut = rollout.costs.tool_calls > len(calls)
    rows = (
        (parameters.reads_before_edits, is_cut or edits_unread(calls)),
        (parameters.fixes_own_lints, is_cut or leaves_lints(calls)),
        (parameters.runs_tests, is_cut or skips_tests(calls)),
        (parameters.closes_todos, is_cut or leaves_todos(calls)),
    )
    total = math.fsum(weight for weight, _ in rows)
    broken = math.fsum(weight for weight, is_broken in rows if is_broken)
    return broken / total if total else 0.0


def edits_unread(calls: Calls) -> bool:
    """True if a file was changed that no earlier turn had shown, and that is not new.

    Calls of one turn are written before any of them is answered: a read in the same turn informed
    nothing.
    """
    known: set[str] = set()
    for place, call in enumerate(calls):
        for edit in transcript.edits(call):
            is_read = edit.path in known or any(
                earlier.turn < call.turn and transcript.shows_file(earlier, edit.path)
                for earlier in calls[:place]
            )
            if not (edit.is_new or is_read):
                return True
            known.add(edit.path)
    return False


def leaves_lints(calls: Calls) -> bool:
    """True if the last diagnostics of a changed file are not empty."""
    paths = {edit.path for call in calls for edit in transcript.edits(call)}
    for path in paths:
        reports = [call for call in calls if transcript.reports_lints(call, path)]
        if transcript.has_lints(reports[-1], path):
            return True
    return False


def skips_tests(calls: Calls) -> bool:
    """True if files were changed and no tests ran after the last change."""
    edited = [place for place, call in enumerate(calls) if transcript.edits(call)]
    if not edited:
        return False
    later = calls[edited[-1] + 1 :]
    return all(transcript.read_test_outcome(call) is None for call in later)


def leaves_todos(calls: Calls) -> bool:
    """True if the last list of to-dos has an open one."""
    counts = [n for call in calls if (n := transcript.count_open_todos(call)) is not None]
    return bool(counts) and counts[-1] > 0


FUNCTION = Penalty(version="1", parameters=HabitsParameters, penalty=penalty)
