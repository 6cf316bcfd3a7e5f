"""Comparison of two recorded evaluations, by the rows of their rollouts."""

from collections.abc import Iterable, Mapping, Sequence, Sized
from typing import Any, NamedTuple

from etude.common.evaluation.comparison import PairedDifference, compare_by_task
from etude.common.evaluation.gate import GateDecision, MarginRule, decide_gate
from etude.common.evaluation.scores import METRICS, Samples

Row = Mapping[str, Any]


class RecordedComparison(NamedTuple):
    """Differences by metric, and the decision on them."""

    differences: Mapping[str, PairedDifference]
    decision: GateDecision


def metric_rule(metric: str, margin: float) -> MarginRule:
    """The rule about one metric of the rows.

    Raises:
        KeyError: there is no such metric.
        ValueError: the margin is not above 0.
    """
    known = METRICS[metric]
    return MarginRule(
        metric=metric,
        margin=margin,
        is_share=known.is_share,
        less_is_better=known.less_is_better,
    )


def compare_rows(
    candidate: Sequence[Row], served: Sequence[Row], rules: Sequence[MarginRule], *, min_tasks: int
) -> RecordedComparison:
    """Compare the rollouts of two policies on the same tasks.

    Args:
        candidate: rows, one per planned rollout.
        served: rows of the policy in use.
        rules: margins by metric.
        min_tasks: fewer common tasks decide nothing.
    """
    differences = {}
    for rule in rules:
        old, new = (samples_of(rows, rule.metric) for rows in (served, candidate))
        if old.keys() & new.keys():
            lost = (_num_lost(candidate, new), _num_lost(served, old))
            differences[rule.metric] = _difference(new, old, lost, is_share=rule.is_share)
    return RecordedComparison(differences, decide_gate(differences, rules, min_tasks=min_tasks))


def samples_of(rows: Iterable[Row], metric: str) -> dict[str, list[float]]:
    """Values of a metric by task; rollouts that the platform lost have none."""
    found: dict[str, list[float]] = {}
    for row in rows:
        value = row.get(metric)
        if ("reward" in row or "success" in row) and isinstance(value, int | float):
            found.setdefault(str(row.get("task_id")), []).append(float(value))
    return found


def _num_lost(rows: Sized, samples: Samples) -> int:
    return len(rows) - sum(map(len, samples.values()))


def _difference(
    candidate: Samples, served: Samples, lost: tuple[int, int], *, is_share: bool
) -> PairedDifference:
    values = [value for each in (candidate, served) for row in each.values() for value in row]
    largest = 1.0 if is_share else max(values) - min(values)
    return compare_by_task(candidate, served, largest_change=largest, lost=lost)
