"""A confidence sequence may be looked at for ever."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.feedback.experiments.msprt import sequence_margin
from etude.feedback.experiments.user_moments import Difference


def difference(value: float | np.ndarray, variance: float | np.ndarray) -> Difference:
    value, variance = np.asarray(value, np.float64), np.asarray(variance, np.float64)
    zero = np.zeros_like(value)
    return Difference(control=zero, treatment=value, value=value, variance=variance)


@given(st.floats(1e-6, 1e-2), st.floats(0.003, 0.1), st.sampled_from([0.05, 0.01]))
def test_at_the_margin_the_mixture_of_likelihood_ratios_is_one_over_alpha(
    variance: float, tau: float, alpha: float
) -> None:
    """The mixture by numerical integration over true differences."""
    margin = float(sequence_margin(difference(0.0, variance), tau, alpha))
    effects = np.linspace(-12 * tau, 12 * tau, 200_001)
    prior = np.exp(-(effects**2) / (2 * tau**2)) / (tau * math.sqrt(2 * math.pi))
    ratio = np.exp(margin * effects / variance - effects**2 / (2 * variance))
    mixture = float((prior * ratio).sum() * (effects[1] - effects[0]))
    assert mixture == pytest.approx(1 / alpha, rel=1e-3)


def test_without_a_difference_the_sequence_is_left_at_most_as_often_as_alpha() -> None:
    """2,000 experiments of 50,000 users an arm, looked at 500 times."""
    looks, alpha, tau = 500, 0.05, 0.03
    users = 100 * np.arange(1, looks + 1)
    steps = np.random.default_rng(3).normal(0, math.sqrt(2 * 100), size=(2_000, looks))
    values = steps.cumsum(axis=1) / users
    margins = sequence_margin(difference(values, 2 / users), tau, alpha)
    share = float((np.abs(values) > margins).any(axis=1).mean())
    assert 0.005 < share < alpha


@given(st.floats(1e-9, 1e2), st.floats(1e-3, 1.0))
def test_the_sequence_is_wider_than_the_interval_of_one_look(variance: float, tau: float) -> None:
    margin = float(sequence_margin(difference(0.0, variance), tau, 0.05))
    assert margin > 1.96 * math.sqrt(variance)


def test_where_nothing_varies_no_difference_is_left_out() -> None:
    assert 0.0 <= float(sequence_margin(difference(0.0, 0.0), 0.01, 0.05)) < 1e-6
