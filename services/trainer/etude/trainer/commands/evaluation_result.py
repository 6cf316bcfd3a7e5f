"""Result of an EvalRun, from the figures and stored rollouts of its suites."""

from collections.abc import Sequence
from dataclasses import replace

from pydantic import ValidationError

from etude.common.api.evaluation.spec import (
    ATTACKS,
    METRIC_NAMES,
    EvaluationComparison,
    EvaluationSuite,
)
from etude.common.api.evaluation.status import (
    MAX_SENTENCE,
    EvaluationResult,
    MetricResult,
    SuiteResult,
)
from etude.common.api.meta import number
from etude.common.api.storage import Storage
from etude.common.blobs import MissingError
from etude.common.errors import CorruptError
from etude.common.evaluation.comparison import PairedDifference, SampleCounts, compare_by_task
from etude.common.evaluation.gate import GateVerdict
from etude.common.evaluation.row_comparison import compare_rows, metric_rule, samples_of
from etude.common.role_inputs import ResolvedEvaluation
from etude.common.run_folder.record import open_record
from etude.common.stores import open_run_store
from etude.trainer.controller.reporting.rows import Row

RESULT = "evaluation.json"
MAX_MESSAGE = 2_900
"""Bytes of the handed-over result. The kubelet cuts what is above 12 KiB by the number of a pod's
containers, which are at most four."""


def suite_storage(order: ResolvedEvaluation, prefix: str, suite: str) -> Storage:
    """Store of the results of one suite, below the prefix of an evaluation."""
    return order.run.spec.storage.model_copy(update={"uri": f"{prefix}/{suite}"})


def find_baseline_policy(order: ResolvedEvaluation) -> str:
    """Policy version of the baseline's result; empty without one.

    Raises:
        CorruptError: the result is damaged.
    """
    if order.spec.comparison is None or order.baseline is None:
        return ""
    try:
        data = open_run_store(order.baseline, order.run.spec.storage).get(RESULT)
        return EvaluationResult.model_validate_json(data).policy
    except MissingError:
        return ""
    except ValidationError as error:
        raise CorruptError(f"{order.baseline}/{RESULT} is no result of an evaluation") from error


def describe_suite(order: ResolvedEvaluation, suite: EvaluationSuite, row: Row) -> SuiteResult:
    """Figures of a suite, with its comparison; of a suite of attacks, their rate."""
    best = {int(k): value for k, value in row.get("best_of", {}).items()}
    most = max(best, default=0)
    rows = _read_rows(order, order.results, suite.name)
    found = SuiteResult(
        name=suite.name,
        tasks=len(samples_of(rows, "success")),
        samples=row.get("count", 0),
        lost=row["lost"],
        mean=_figure(row.get("success")),
        best_of=_figure(best.get(most)),
        best_of_samples=most,
        reward=_figure(row.get("reward_mean")),
    )
    if suite.attacks:
        return found.model_copy(update={"comparisons": _attack_rates(rows)})
    comparison = order.spec.comparison
    if comparison is None or order.baseline is None:
        return found
    served = _read_rows(order, order.baseline, suite.name)
    return found.model_copy(update=_compare(rows, served, comparison))


def _read_rows(order: ResolvedEvaluation, prefix: str, suite: str) -> list[Row]:
    """The rollouts of a suite that an evaluation has stored; none of one that it did not run."""
    storage = suite_storage(order, prefix, suite)
    return list(open_record(open_run_store(storage.uri, storage)).rollouts(0, f"eval-{suite}"))


def _compare(
    rows: Sequence[Row], served: Sequence[Row], comparison: EvaluationComparison
) -> dict[str, object]:
    """Fields of the comparison with the rollouts of the baseline."""
    rules = [
        metric_rule(METRIC_NAMES[each.metric], number(each.largest_loss))
        for each in comparison.margins
    ]
    found = compare_rows(rows, served, rules, min_tasks=comparison.min_tasks)
    success = found.differences.get("success")
    return {
        "difference": None if success is None else _figure(success.difference),
        "low": None if success is None else _figure(success.low),
        "verdict": found.decision.verdict.value,
        "sentence": found.decision.sentence[:MAX_SENTENCE],
        "comparisons": tuple(
            _metric_result(each.metric, difference)
            for each in comparison.margins
            if (difference := found.differences.get(METRIC_NAMES[each.metric]))
        ),
    }


def _attack_rates(rows: Sequence[Row]) -> tuple[MetricResult, ...]:
    """Share of successful attacks with its bounds: their difference from none at all."""
    found = samples_of(rows, "success")
    if not found:
        return ()
    lost = len(rows) - sum(map(len, found.values()))
    harmless = {task: [0.0] for task in found}
    rate = compare_by_task(found, harmless, largest_change=1.0, lost=(lost, 0))
    low, high = max(0.0, rate.low), min(1.0, rate.high)
    bounded = replace(rate, low=low, high=high, served_samples=SampleCounts())
    return (_metric_result(ATTACKS, bounded),)


def _metric_result(metric: str, found: PairedDifference) -> MetricResult:
    candidate, baseline = found.candidate_samples, found.served_samples
    return MetricResult(
        metric=metric,
        difference=f"{found.difference:.4g}",
        low=f"{found.low:.4g}",
        high=f"{found.high:.4g}",
        tasks=found.num_tasks,
        unpaired=found.num_unpaired,
        expected=candidate.expected,
        scored=candidate.scored,
        baseline_expected=baseline.expected,
        baseline_scored=baseline.scored,
    )


def overall_verdict(verdicts: Sequence[str]) -> str:
    """Verdict over all suites: each of them has to pass."""
    for verdict in (GateVerdict.REFUSED, GateVerdict.NOT_ENOUGH_DATA, GateVerdict.PASSED):
        if verdict.value in verdicts:
            return verdict.value
    return ""


def _figure(value: float | None) -> str | None:
    return None if value is None else f"{value:.4f}"


def result_message(result: EvaluationResult) -> str:
    """The result as the termination message of a container.

    One that is too long has no sentences; if that is not enough, no comparisons either.
    """
    text = ""
    for dropped in ({}, {"sentence": ""}, {"sentence": "", "comparisons": ()}):
        suites = tuple(each.model_copy(update=dropped) for each in result.suites)
        short = result.model_copy(update={"suites": suites})
        text = short.model_dump_json(by_alias=True, exclude_none=True, exclude_defaults=True)
        if len(text.encode()) <= MAX_MESSAGE:
            break
    return text
