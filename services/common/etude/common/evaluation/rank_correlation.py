"""Rank correlation of two figures of the same things, with a bootstrap interval."""

import math
import random
from collections.abc import Sequence
from typing import NamedTuple

RESAMPLES = 2_000
_LOW, _HIGH = 0.025, 0.975


class RankCorrelation(NamedTuple):
    """Spearman's correlation, and its 95 % bootstrap interval."""

    value: float
    low: float
    high: float


def rank_values(values: Sequence[float]) -> list[float]:
    """Ranks from 1 on; equal values share the mean of theirs.  [N] -> [N]."""
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0.0] * len(values)
    first = 0
    while first < len(order):
        last = first
        while last + 1 < len(order) and values[order[last + 1]] == values[order[first]]:
            last += 1
        for place in order[first : last + 1]:
            ranks[place] = (first + last) / 2 + 1
        first = last + 1
    return ranks


def spearman(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Correlation of the ranks; None where one of the figures never differs.  [N], [N].

    Source: https://en.wikipedia.org/wiki/Spearman%27s_rank_correlation_coefficient.
    """
    return _pearson(rank_values(first), rank_values(second))


def correlate_ranks(
    first: Sequence[float], second: Sequence[float], *, seed: int = 0
) -> RankCorrelation | None:
    """Spearman's correlation with an interval over resampled pairs; None as in spearman().

    Resamples in which one of the figures never differs are left out of the interval.
    """
    value = spearman(first, second)
    if value is None:
        return None
    drawn = random.Random(seed)  # noqa: S311 - a resample, no secret
    places = range(len(first))
    resampled = (drawn.choices(places, k=len(first)) for _ in range(RESAMPLES))
    found = sorted(
        each
        for chosen in resampled
        if (each := spearman([first[i] for i in chosen], [second[i] for i in chosen])) is not None
    )
    return RankCorrelation(value, _quantile(found, _LOW), _quantile(found, _HIGH))


def _pearson(first: Sequence[float], second: Sequence[float]) -> float | None:
    if len(first) < 2:
        return None
    means = sum(first) / len(first), sum(second) / len(second)
    pairs = [(x - means[0], y - means[1]) for x, y in zip(first, second, strict=True)]
    squares = sum(x * x for x, _ in pairs) * sum(y * y for _, y in pairs)
    if squares == 0:
        return None
    return max(-1.0, min(1.0, sum(x * y for x, y in pairs) / math.sqrt(squares)))


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
