"""Comparison of two policies on the same tasks, with a bootstrap over tasks."""

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from etude.common.errors import InvalidFieldError
from etude.common.evaluation.scores import Samples, mean_by_task

RESAMPLES = 10_000
CONFIDENCE = 0.95
"""Of each bound alone: one bound decides at the gate."""
_BLOCK = 1 << 20
"""Numbers drawn at a time."""
_SPARSE_BOUNDS = (3.00, 4.74, 6.30, 7.75, 9.15)
"""Upper 95 % bounds of a Poisson mean after 0 to 4 events; the first is the "rule of three"."""


@dataclass(frozen=True, slots=True)
class SampleCounts:
    """Samples of one policy: those that were planned, and those that have a value."""

    expected: int = 0
    scored: int = 0

    @property
    def lost(self) -> int:
        """Samples that a platform fault left without a value."""
        return self.expected - self.scored


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedDifference:
    """Candidate minus served, of one metric, on the tasks that both have samples of."""

    num_tasks: int
    num_unpaired: int
    """Tasks with samples of one policy only, which are left out."""
    difference: float
    """Mean over tasks, in the metric's unit."""
    low: float
    """Lower 95 % bound."""
    high: float
    """Upper 95 % bound."""
    candidate_samples: SampleCounts = SampleCounts()
    served_samples: SampleCounts = SampleCounts()

    def negate(self) -> "PairedDifference":
        """The difference of a metric where less is better: positive for a better candidate."""
        return replace(self, difference=-self.difference, low=-self.high, high=-self.low)


def compare_by_task(
    candidate: Samples,
    served: Samples,
    *,
    largest_change: float,
    lost: tuple[int, int] = (0, 0),
    seed: int = 0,
) -> PairedDifference:
    """Compare the two policies' means task by task; tasks are what is resampled.

    Samples of one task depend on each other, so that only whole tasks are drawn. Where fewer than
    five tasks differ, resamples are too much alike, and the bounds also allow for the worse (or
    better) tasks that so few tasks may hide: Poisson bounds on their number.

    Args:
        candidate: samples by task.
        served: samples by task.
        largest_change: by which one task's value can differ; 1 for shares.
        lost: samples without a value, of the candidate and of the served policy.
        seed: of the resamples.

    Raises:
        InvalidFieldError: there is no common task, or a value is not finite.

    Source: percentile bootstrap, widened by sqrt(n / (n - 1)) as in Hesterberg 2015,
    https://arxiv.org/abs/1411.5279.
    """
    first, second = mean_by_task(candidate), mean_by_task(served)
    tasks = sorted(first.keys() & second.keys())
    if not tasks:
        raise InvalidFieldError("served", "has no task in common with the candidate")
    differences = np.array([first[task] - second[task] for task in tasks])
    if not np.isfinite(differences).all():
        raise InvalidFieldError("candidate", "or served has a value that is not finite")
    low, high = _bounds(differences, seed=seed)
    if np.count_nonzero(differences) < len(_SPARSE_BOUNDS):
        hidden = largest_change / len(tasks)
        low = min(low, -hidden * _SPARSE_BOUNDS[np.count_nonzero(differences < 0)])
        high = max(high, hidden * _SPARSE_BOUNDS[np.count_nonzero(differences > 0)])
    return PairedDifference(
        num_tasks=len(tasks),
        num_unpaired=len(first.keys() ^ second.keys()),
        difference=float(differences.mean()),
        low=low,
        high=high,
        candidate_samples=_sample_counts(candidate, lost[0]),
        served_samples=_sample_counts(served, lost[1]),
    )


def _sample_counts(samples: Samples, lost: int) -> SampleCounts:
    scored = sum(map(len, samples.values()))
    return SampleCounts(scored + lost, scored)


def _bounds(differences: NDArray[np.float64], *, seed: int) -> tuple[float, float]:
    """Percentile bounds of the mean. [n] -> lower, upper."""
    size = len(differences)
    random = np.random.default_rng(seed)
    rows = max(1, _BLOCK // size)
    means = np.concatenate(
        [
            differences[random.integers(size, size=(min(rows, RESAMPLES - start), size))].mean(1)
            for start in range(0, RESAMPLES, rows)
        ]
    )
    middle = differences.mean()
    if size > 1:
        means = middle + (means - middle) * math.sqrt(size / (size - 1))
    low, high = np.quantile(means, [1 - CONFIDENCE, CONFIDENCE])
    return float(low), float(high)
