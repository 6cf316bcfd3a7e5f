"""Statistics of monitors, against published tables and direct definitions."""

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.common.monitors.significance import (
    Ratio,
    correlation_z_score,
    mean_z_score,
    normal_deviate,
    slope_z_score,
)


@pytest.mark.parametrize(
    ("t", "freedom", "probability"),
    [
        (2.132, 4, 0.95),
        (3.747, 4, 0.99),
        (3.365, 5, 0.99),
        (1.812, 10, 0.95),
        (2.764, 10, 0.99),
        (3.169, 10, 0.995),
        (2.457, 30, 0.99),
        (3.385, 30, 0.999),
    ],
)
def test_students_t_becomes_the_deviate_of_the_same_probability(
    t: float, freedom: int, probability: float
) -> None:
    expected = statistics.NormalDist().inv_cdf(probability)
    assert normal_deviate(t, freedom) == pytest.approx(expected, abs=0.02)
    assert normal_deviate(-t, freedom) == pytest.approx(-expected, abs=0.02)


def test_a_line_has_an_infinite_slope_score_and_a_constant_has_none() -> None:
    assert slope_z_score([0.5] * 10) == 0
    assert slope_z_score([0.0, 1.0]) == 0
    assert slope_z_score([float(2 * x) for x in range(10)]) > 30
    assert slope_z_score([float(-2 * x) for x in range(10)]) < -30


@given(values=st.lists(st.floats(-10, 10), min_size=6, max_size=30), shift=st.floats(-5, 5))
def test_a_slope_score_ignores_the_level_and_turns_with_the_sign(
    values: list[float], shift: float
) -> None:
    found = slope_z_score(values)
    assert slope_z_score([-v for v in values]) == pytest.approx(-found, rel=1e-6, abs=1e-6)
    if statistics.pstdev(values) > 1e-3:
        moved = slope_z_score([v + shift for v in values])
        assert moved == pytest.approx(found, rel=1e-3, abs=1e-3)


def test_a_ratio_is_of_sums_and_its_score_counts_rollouts() -> None:
    ratio = Ratio([1, 0, 2, 0], [10, 10, 20, 10])
    assert ratio.value == 3 / 50
    residuals = [1 - 0.5, -0.5, 2 - 1.0, -0.5]
    error = statistics.stdev(residuals) / 2
    assert ratio.z_score(0.05) == pytest.approx(statistics.fmean(residuals) / error)
    assert Ratio([], []).value == 0


def test_values_without_spread_are_certain() -> None:
    assert mean_z_score([0.0, 0.0]) == 0
    assert mean_z_score([1.0, 1.0]) == math.inf
    assert mean_z_score([-1.0]) == -math.inf


def test_a_correlation_must_exceed_its_limit_significantly() -> None:
    steps = [float(x) for x in range(100)]
    assert correlation_z_score(steps, steps, limit=0.3) > 10
    assert correlation_z_score(steps, [-x for x in steps], limit=0.3) < -10
    assert correlation_z_score([1.0] * 100, steps, limit=0.3) == -math.inf
    assert correlation_z_score([0.0, 1.0, 2.0], [0.0, 1.0, 2.0], limit=0.3) == -math.inf
