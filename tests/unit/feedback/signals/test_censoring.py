"""Censored persistence: equal to the textbook's curve, and to the truth of simulated edits."""

import hypothesis.strategies as st
import pytest
from hypothesis import given
from tests.support.feedback.credit_simulation import simulate_persistence

from etude.feedback.signals.censoring import (
    CensoringCurve,
    EditFate,
    LineLoss,
    estimate_censoring,
    persistence,
)

H = 100.0


def lost(age_s: float, share: float = 1.0) -> EditFate:
    return EditFate((LineLoss(age_s, share),), H)


def unseen(age_s: float) -> EditFate:
    return EditFate((), age_s)


def test_the_curve_of_a_worked_example() -> None:
    """Five edits: lost at 10, censored at 20, lost at 30, censored at 40, alive at the end."""
    fates = [lost(10), unseen(20), lost(30), unseen(40), unseen(H)]
    curve = estimate_censoring(fates, horizon_s=H)
    assert curve.ages_s == [20, 40]
    assert curve.chances == pytest.approx([3 / 4, 3 / 4 * 1 / 2])
    assert [curve.chance_before(age) for age in (20, 21, 40, 41)] == pytest.approx(
        [1, 3 / 4, 3 / 4, 3 / 8]
    )
    values = [persistence(fate, curve) for fate in fates]
    assert values == pytest.approx([0, 1, 1 - 4 / 3, 1, 1])


def test_of_a_loss_and_a_censoring_at_one_age_the_loss_comes_first() -> None:
    curve = estimate_censoring([lost(10), unseen(10), unseen(H)], horizon_s=H)
    assert curve.chances == pytest.approx([1 / 2])
    assert curve.chance_before(10) == 1.0


def test_no_edit_stands_for_more_than_ten() -> None:
    curve = CensoringCurve([1.0], [0.001])
    assert persistence(lost(10), curve) == pytest.approx(1 - 10)


@given(ages=st.lists(st.tuples(st.floats(0.5, 150), st.floats(0.5, 150)), min_size=1, max_size=40))
def test_without_censoring_the_estimate_is_the_share_alive(ages: list[tuple[float, float]]) -> None:
    fates = [lost(age) if age <= H else unseen(H) for age, _ in ages]
    curve = estimate_censoring(fates, horizon_s=H)
    estimate = sum(persistence(fate, curve) for fate in fates) / len(fates)
    assert estimate == pytest.approx(sum(age > H for age, _ in ages) / len(ages))


@given(ages=st.lists(st.tuples(st.floats(0.5, 150), st.floats(0.5, 150)), min_size=1, max_size=40))
def test_the_estimate_is_that_of_kaplan_and_meier(ages: list[tuple[float, float]]) -> None:
    """Both weigh the same where no weight is cut: an identity of the two estimators."""
    fates = [lost(t) if t <= min(c, H) else unseen(min(c, H)) for t, c in ages]
    curve = estimate_censoring(fates, horizon_s=H)
    if any(fate.losses and curve.chance_before(fate.losses[0].age_s) < 0.1 for fate in fates):
        return
    survival, events = 1.0, sorted((min(t, c, H), t > min(c, H)) for t, c in ages)
    for place, (age, is_censored) in enumerate(events):
        if not is_censored and age <= H:
            survival *= 1 - 1 / (len(events) - place)
    estimate = sum(persistence(fate, curve) for fate in fates) / len(fates)
    assert estimate == pytest.approx(survival, abs=1e-9)


def test_with_30_percent_censored_the_estimate_is_the_truth() -> None:
    found = simulate_persistence(15_000, censored=0.3, leave_after_loss=0.0, seed=0)
    assert abs(found.estimate - found.truth) <= 0.01
    assert abs(found.complete_cases - found.truth) > 0.02
    assert abs(found.no_news - found.truth) > 0.05


def test_users_who_leave_because_of_bad_edits_bias_the_estimate_upwards() -> None:
    """No weight repairs what depends on the fate itself."""
    found = simulate_persistence(15_000, censored=0.3, leave_after_loss=0.2, seed=0)
    assert 0.02 < found.estimate - found.truth < 0.15
