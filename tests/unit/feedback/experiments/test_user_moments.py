"""Users are the unit: their events are clusters, and their history is taken out."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.feedback.experiments.user_moments import UserMoments, compare_arms, fill_histories

RNG = np.random.default_rng(7)
EVENTS = [RNG.geometric(0.2, size) for size in (400, 500)]
KEPT = [RNG.binomial(events, 0.6) for events in EVENTS]
HISTORIES = [
    kept / events + RNG.normal(0, 0.2, len(events))
    for kept, events in zip(KEPT, EVENTS, strict=True)
]


def arms(scale: int = 1, shift: float = 0.0, *, is_history_known: bool = True):
    return [
        UserMoments.from_users(
            scale * kept, scale * events, history + shift if is_history_known else None
        )
        for kept, events, history in zip(KEPT, EVENTS, HISTORIES, strict=True)
    ]


def test_a_mean_over_users_has_the_variance_of_welch() -> None:
    control, treatment = RNG.normal(1.0, 2.0, 300), RNG.normal(1.5, 1.0, 200)
    found = compare_arms(UserMoments.from_users(control), UserMoments.from_users(treatment))
    assert float(found.value) == pytest.approx(treatment.mean() - control.mean())
    expected = control.var(ddof=1) / 300 + treatment.var(ddof=1) / 200
    assert float(found.variance) == pytest.approx(expected)


@given(st.integers(1, 50))
def test_a_users_events_count_as_one_cluster(scale: int) -> None:
    """The same users with many times as many events of the same kind know no more."""
    once, often = compare_arms(*arms()), compare_arms(*arms(scale))
    assert float(often.value) == pytest.approx(float(once.value))
    assert float(often.variance) == pytest.approx(float(once.variance))


def test_a_ratio_has_the_variance_that_resampled_users_show() -> None:
    found = compare_arms(*arms(is_history_known=False))
    drawn = []
    for _ in range(2_000):
        ratios = []
        for kept, events in zip(KEPT, EVENTS, strict=True):
            users = RNG.integers(len(kept), size=len(kept))
            ratios.append(kept[users].sum() / events[users].sum())
        drawn.append(ratios[1] - ratios[0])
    assert float(found.variance) == pytest.approx(np.var(drawn), rel=0.15)


def test_history_removes_the_share_of_the_variance_that_it_explains() -> None:
    history = RNG.normal(size=(2, 20_000))
    values = 0.8 * history + 0.6 * RNG.normal(size=(2, 20_000))
    plain = compare_arms(*(UserMoments.from_users(each) for each in values))
    adjusted = compare_arms(
        *(UserMoments.from_users(y, None, x) for y, x in zip(values, history, strict=True))
    )
    assert float(adjusted.variance / plain.variance) == pytest.approx(1 - 0.8**2, rel=0.05)


@given(st.floats(-100, 100))
def test_a_shift_of_all_histories_changes_nothing(shift: float) -> None:
    plain, shifted = compare_arms(*arms()), compare_arms(*arms(shift=shift))
    assert float(shifted.value) == pytest.approx(float(plain.value), abs=1e-9)
    assert float(shifted.variance) == pytest.approx(float(plain.variance), rel=1e-6)


def test_many_experiments_are_compared_like_one_after_the_other() -> None:
    control, treatment = arms()
    both = [
        UserMoments(
            users=np.stack([first.users, second.users]),
            sums=np.stack([first.sums, second.sums]),
            products=np.stack([first.products, second.products]),
        )
        for first, second in ((control, treatment), (treatment, control))
    ]
    together = compare_arms(*both)
    for index, pair in enumerate(((control, treatment), (treatment, control))):
        alone = compare_arms(*pair)
        assert float(together.value[index]) == pytest.approx(float(alone.value))
        assert float(together.z[index]) == pytest.approx(float(alone.z))


def test_arms_that_are_constant_and_differ_do_so_beyond_doubt() -> None:
    found = compare_arms(
        UserMoments.from_users(np.zeros(300)), UserMoments.from_users(np.ones(100))
    )
    assert float(found.z) == pytest.approx(20.0)


def test_arms_that_are_constant_and_equal_do_not_differ() -> None:
    found = compare_arms(UserMoments.from_users(np.ones(30)), UserMoments.from_users(np.ones(10)))
    assert (float(found.value), float(found.z)) == (0.0, 0.0)


def test_users_without_history_have_the_mean_of_both_arms() -> None:
    control, treatment = fill_histories([1.0, math.nan], [5.0, 6.0, math.nan])
    assert control.tolist() == [1.0, 4.0]
    assert treatment.tolist() == [5.0, 6.0, 4.0]
    assert fill_histories([math.nan], [math.nan])[0].tolist() == [0.0]


@pytest.mark.parametrize("values", [[1.0, math.nan], [math.inf], [[1.0], [2.0]]])
def test_values_that_are_no_finite_numbers_are_refused(values: list[float]) -> None:
    with pytest.raises(ValueError, match="finite"):
        UserMoments.from_users(values)
