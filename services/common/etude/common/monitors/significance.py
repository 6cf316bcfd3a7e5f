"""Statistics that monitors share: shares against earlier ones, slopes, correlations."""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

Z_LIMIT = 3.5
"""One-sided p of 0.0002: nine monitors read every window."""


class Ratio(NamedTuple):
    """Sum of one column over the sum of another, rollout by rollout."""

    numerators: Sequence[float]
    denominators: Sequence[float]

    @property
    def value(self) -> float:
        """0 if the denominators are all 0."""
        total = math.fsum(self.denominators)
        return math.fsum(self.numerators) / total if total else 0.0

    def z_score(self, expected: float) -> float:
        """Distance from an expected ratio in standard errors; rollouts are the units.

        Residuals y - expected x have mean 0 if the ratio is as expected (Cochran 1977, §2.11).
        Calls of one rollout are not independent, so calls are no units.
        """
        residuals = [
            y - expected * x for y, x in zip(self.numerators, self.denominators, strict=True)
        ]
        return mean_z_score(residuals)


def mean_z_score(values: Sequence[float]) -> float:
    """Mean in units of its standard error; infinite if all values are one that is not 0."""
    if not values:
        return 0.0
    mean = statistics.fmean(values)
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    if error:
        return mean / error
    return math.copysign(math.inf, mean) if mean else 0.0


def correlation_z_score(one: Sequence[float], other: Sequence[float], *, limit: float) -> float:
    """Standard errors by which a correlation exceeds a limit (Fisher's transform)."""
    try:
        found = min(0.999999, max(-0.999999, statistics.correlation(one, other)))
    except statistics.StatisticsError:  # fewer than two values, or all the same
        return -math.inf
    if len(one) < 4:
        return -math.inf
    return (math.atanh(found) - math.atanh(limit)) * math.sqrt(len(one) - 3)


def slope_z_score(values: Sequence[float]) -> float:
    """Slope over equal steps in standard errors, as a normal deviate; 0 for fewer than 6 steps."""
    count = len(values)
    if count < 6:
        return 0.0
    steps = range(count)
    slope, intercept = statistics.linear_regression(steps, values)
    squares = math.fsum(
        (y - intercept - slope * x) ** 2 for x, y in zip(steps, values, strict=True)
    )
    spread = math.fsum((x - (count - 1) / 2) ** 2 for x in steps)
    freedom = count - 2
    error = math.sqrt(squares / freedom / spread)
    if error <= 1e-12 * abs(slope):
        return math.copysign(math.inf, slope) if slope else 0.0
    return normal_deviate(slope / error, freedom)


def normal_deviate(t: float, freedom: int) -> float:
    """Student's t as the normal deviate of the same probability, off by less than 0.02.

    z = (8d + 1) / (8d + 3) sqrt(d ln(1 + t²/d)) for d degrees of freedom, from 4 on (Wallace 1959).
    """
    z = (8 * freedom + 1) / (8 * freedom + 3) * math.sqrt(freedom * math.log1p(t * t / freedom))
    return math.copysign(z, t)
