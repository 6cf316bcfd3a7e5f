"""Mean and best-of-K scores of an evaluation with several samples per task."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from etude.common.errors import InvalidFieldError

Samples = Mapping[str, Sequence[float]]
"""Values of one metric by task: one per sample, at least one."""


class RowMetric(NamedTuple):
    """Meaning of one figure of a rollout's row."""

    is_share: bool = False
    less_is_better: bool = True


METRICS = {
    "success": RowMetric(is_share=True, less_is_better=False),
    "reward": RowMetric(less_is_better=False),
    "seconds": RowMetric(),
    "read_tokens": RowMetric(),
    "sampled_tokens": RowMetric(),
    "edits_without_evidence": RowMetric(),
}
"""Figures in the row of a rollout, by name."""


def mean_at_n(samples: Samples) -> float:
    """Mean over tasks of each task's mean: tasks weigh the same, however many samples they have.

    Raises:
        InvalidFieldError: there is no task.
    """
    return statistics.fmean(mean_by_task(_require_tasks(samples)).values())


def mean_by_task(samples: Samples) -> dict[str, float]:
    """Mean of the samples of each task."""
    return {task: statistics.fmean(values) for task, values in samples.items()}


def best_of_k(samples: Samples, *, k: int) -> float:
    """Mean over tasks of the expected best of k samples, without bias.

    Args:
        samples: of which each task has at least k.
        k: samples of which the best counts.

    Raises:
        InvalidFieldError: there is no task, or one has fewer than k samples.
    """
    for task, values in _require_tasks(samples).items():
        if not 1 <= k <= len(values):
            what = f"must be from 1 to {len(values)}, the samples of task {task}; it is {k}"
            raise InvalidFieldError("k", what)
    return statistics.fmean(expected_best(values, k=k) for values in samples.values())


def expected_best(values: Sequence[float], *, k: int) -> float:
    """Mean of the largest value over all subsets of k values: unbiased for the best of k draws.

    The i-th smallest of n values is the largest of C(i - 1, k - 1) subsets. For values 0 and 1
    this is pass@k, 1 - C(n - c, k) / C(n, k) with c ones.

    Source: Chen et al. 2021, https://arxiv.org/abs/2107.03374, for 0 and 1.
    """
    subsets = math.comb(len(values), k)
    return math.fsum(
        math.comb(place, k - 1) / subsets * value for place, value in enumerate(sorted(values))
    )


def _require_tasks(samples: Samples) -> Samples:
    if not samples:
        raise InvalidFieldError("samples", "hold no task")
    return samples
