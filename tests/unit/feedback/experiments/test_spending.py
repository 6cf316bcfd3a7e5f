"""Boundaries spend alpha by the realised information, and no more."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.feedback.experiments.spending import MIN_STEP, boundaries, spent_alpha

PUBLISHED = {
    2: (2.9626, 1.9686),
    3: (3.7103, 2.5114, 1.9930),
    5: (4.8769, 3.3569, 2.6803, 2.2898, 2.0310),
}
"""By equal looks, for alpha 0.05 on both sides: tables of Lan and DeMets, as in R's ldbounds."""
CLASSIC = {5: 2.040, 20: 2.13, 100: 2.18}
"""Last limit of O'Brien and Fleming's own bounds, which spend more before the end."""
fractions = st.lists(st.integers(1, 1_400), min_size=1, max_size=8, unique=True).map(
    lambda counts: tuple(count / 1_000 for count in sorted(counts))
)


def even(looks: int) -> tuple[float, ...]:
    return tuple((look + 1) / looks for look in range(looks))


@pytest.mark.parametrize("looks", PUBLISHED)
def test_equal_looks_have_the_published_boundaries(looks: int) -> None:
    assert boundaries(even(looks), 0.05) == pytest.approx(PUBLISHED[looks], abs=2e-4)


@pytest.mark.parametrize("looks", CLASSIC)
def test_the_last_boundary_lies_between_one_look_and_the_classic_bounds(looks: int) -> None:
    found = boundaries(even(looks), 0.05)
    assert 1.960 < found[-1] < CLASSIC[looks] + 0.01
    assert all(a > b for a, b in itertools.pairwise(found) if a < math.inf)


@pytest.mark.parametrize(
    ("seen", "is_final"),
    [
        ((0.25, 0.5, 0.75, 1.0), False),
        ((0.1, 0.35, 0.42, 0.9, 1.08), False),
        ((0.3, 0.31, 0.6), True),
    ],
    ids=["equal looks", "unequal looks and an overrun", "an early end"],
)
def test_paths_without_a_difference_cross_as_often_as_alpha_is_spent(
    seen: tuple[float, ...],
    is_final: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    """Simulated Brownian motion, which shares nothing with the integration."""
    alpha, paths = 0.2, 200_000
    steps = np.sqrt(np.diff([0.0, *seen]))
    motion = (np.random.default_rng(1).normal(size=(paths, len(seen))) * steps).cumsum(axis=1)
    limits = np.array(boundaries(seen, alpha, is_final=is_final))
    has_crossed = np.maximum.accumulate(np.abs(motion) / np.sqrt(seen) > limits, axis=1)
    allowed = [spent_alpha(fraction, alpha) for fraction in seen[:-1]] + [alpha]
    error = 4 * math.sqrt(alpha * (1 - alpha) / paths)
    assert has_crossed.mean(axis=0) == pytest.approx(allowed, abs=error)


@given(fractions)
@settings(max_examples=30)
def test_later_looks_change_no_earlier_boundary(seen: tuple[float, ...]) -> None:
    whole = boundaries(seen, 0.05)
    for looks in range(1, len(seen)):
        assert boundaries(seen[:looks], 0.05) == pytest.approx(whole[:looks], abs=1e-5)


@given(fractions)
@settings(max_examples=30)
def test_a_look_at_hardly_more_information_decides_nothing_and_costs_nothing(
    seen: tuple[float, ...],
) -> None:
    often = tuple(moment for fraction in seen for moment in (fraction, fraction + MIN_STEP / 9))
    limits = boundaries(often, 0.05)
    assert limits[1::2] == (math.inf,) * len(seen)
    assert limits[::2] == pytest.approx(boundaries(seen, 0.05), abs=1e-5)


@given(st.floats(0, 2), st.floats(0, 2), st.floats(0.001, 0.5))
def test_more_information_never_spends_less(first: float, second: float, alpha: float) -> None:
    small, large = sorted((first, second))
    assert 0 <= spent_alpha(small, alpha) <= spent_alpha(large, alpha) <= alpha
    assert spent_alpha(1.0, alpha) == alpha


def test_after_all_is_spent_nothing_is_decided() -> None:
    assert boundaries((0.5, 1.0, 1.2), 0.05)[2] == math.inf


@pytest.mark.parametrize("seen", [(0.0, 0.5), (0.5, 0.5), (0.6, 0.5), (math.nan,)])
def test_fractions_that_do_not_rise_are_refused(seen: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="must rise"):
        boundaries(seen, 0.05)


@pytest.mark.parametrize("alpha", [0.0, 1.0, math.nan])
def test_an_alpha_that_is_no_probability_is_refused(alpha: float) -> None:
    with pytest.raises(ValueError, match="alpha must be"):
        boundaries((1.0,), alpha)
