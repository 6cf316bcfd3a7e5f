"""Behaviour in tool calls: reads before edits, tests after edits."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from etude.v1 import rollout_pb2
from etude.v1.rollout_content_pb2 import CallFigures

_Answer = Literal["has_read_before_edit", "has_tests_after_edit", "has_edits_after_failed_test"]


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


TRAJECTORY_FIGURES = ("calls_per_turn", "tool_error_rate", "edit_rate", "looks_before_edit")
TOKEN_KINDS = ("thinking", "call", "final_message", "summary", "tool_output")


def trajectory_figures(rollouts: Sequence[CallFigures]) -> dict[str, float]:
    """Means of a step's rollouts, for its row.

    A figure without a denominator is left out: of rollouts without a call, or without an edit.
    """
    calls = sum(each.calls for each in rollouts)
    edited = sum(each.edits > 0 for each in rollouts)
    shares = {
        "calls_per_turn": (calls, sum(each.turns for each in rollouts)),
        "tool_error_rate": (sum(each.errors for each in rollouts), calls),
        "edit_rate": (edited, len(rollouts)),
        "looks_before_edit": (sum(each.looks_before_edit for each in rollouts), edited),
    }
    return {name: round(part / whole, 4) for name, (part, whole) in shares.items() if whole}


def tool_counts(rollouts: Iterable[CallFigures]) -> dict[str, int]:
    """Calls by tool."""
    counts: Counter[str] = Counter()
    for each in rollouts:
        counts.update(each.tools)
    return dict(counts)


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


def behaviour(rollouts: Sequence[CallFigures]) -> Behaviour:
    """Summarise rollouts."""
    edits = sum(each.edits for each in rollouts)
    return Behaviour(
        rollouts=len(rollouts),
        with_edit=sum(each.edits > 0 for each in rollouts),
        read_before_edit=_share("has_read_before_edit", rollouts),
        tests_after_edit=_share("has_tests_after_edit", rollouts),
        edits_after_failed_test=_share("has_edits_after_failed_test", rollouts),
        edit_error_rate=sum(each.failed_edits for each in rollouts) / edits if edits else None,
        malformed_per_rollout=sum(each.malformed for each in rollouts) / max(1, len(rollouts)),
    )


def _share(answer: _Answer, rollouts: Iterable[CallFigures]) -> float | None:
    """Share of true answers among those that are given."""
    given = [bool(getattr(each, answer)) for each in rollouts if each.HasField(answer)]
    return sum(given) / len(given) if given else None
