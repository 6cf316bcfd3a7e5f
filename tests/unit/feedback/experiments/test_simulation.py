"""Simulated users have the clusters that they are said to have, and rules the power of theory."""

import math
from statistics import NormalDist

import numpy as np
import pytest

from etude.feedback.experiments.simulation import (
    Population,
    draw_experiments,
    try_limits,
    try_msprt,
    try_spending,
)

CLUSTERS = Population(events_per_user=5, correlation=0.2)


@pytest.mark.parametrize("rate", [0.02, 0.6, 0.6137])
def test_users_have_the_rate_the_events_and_the_correlation(rate: float) -> None:
    successes, events = CLUSTERS.types(rate).T
    assert successes.sum() / events.sum() == pytest.approx(rate, abs=1e-5)
    assert events.mean() == pytest.approx(5, rel=0.01)
    assert (events == 1).mean() == pytest.approx(0.2, abs=0.01)
    pairs = (successes * (successes - 1)).sum() / (events * (events - 1)).sum()
    correlation = (pairs - rate**2) / (rate * (1 - rate))
    assert correlation == pytest.approx(0.2, abs=0.01)


def test_a_user_with_one_event_has_one() -> None:
    successes, events = Population().types(0.25).T
    assert set(events.tolist()) == {1}
    assert successes.sum() == len(successes) / 4


@pytest.mark.parametrize(
    ("population", "design_effect"),
    # Of events of one user: (1 + correlation · (E n² / E n - 1)) / E n, with E n² = 45.
    [(Population(), 1.0), (CLUSTERS, (1 + 0.2 * (45 / 5 - 1)) / 5)],
    ids=["one event", "clusters"],
)
def test_one_look_has_the_power_of_the_formula(
    population: Population, design_effect: float
) -> None:
    users, rate, effect = 2_000, 0.6, 0.04
    draws = draw_experiments(population, (rate, rate + effect), (users,), 2_000, seed=5)
    found = try_spending(draws, users, 0.05)
    variance = (rate * (1 - rate) + (rate + effect) * (1 - rate - effect)) * design_effect / users
    expected = NormalDist().cdf(effect / math.sqrt(variance) - 1.96)
    assert found.power == pytest.approx(expected, abs=0.045)
    assert found.false_positives == pytest.approx(0.05, abs=0.02)
    assert found.median_users == users


def test_looking_often_is_paid_for_by_spending_and_not_by_a_fixed_limit() -> None:
    users = tuple(range(200, 4_001, 200))
    draws = draw_experiments(CLUSTERS, (0.6, 0.64), users, 2_000, seed=2)
    spending, peeking = try_spending(draws, 4_000, 0.05), try_limits(draws, [1.96] * len(users))
    msprt = try_msprt(draws, 0.04, 0.05)
    assert spending.false_positives < 0.065
    assert peeking.false_positives > 0.2
    assert msprt.false_positives < 0.03
    assert msprt.power < spending.power
    assert spending.median_users is not None
    assert spending.median_users < 4_000


def test_a_loss_is_seen_like_a_gain() -> None:
    draws = draw_experiments(Population(), (0.6, 0.5), (1_000,), 400)
    assert try_spending(draws, 1_000, 0.05).power > 0.95


def test_everything_follows_from_the_seed() -> None:
    first, second, other = (
        draw_experiments(CLUSTERS, (0.6, 0.62), (300, 600), 50, seed=seed) for seed in (1, 1, 2)
    )
    assert np.array_equal(first.equal.value, second.equal.value)
    assert np.array_equal(first.different.variance, second.different.variance)
    assert not np.array_equal(first.equal.value, other.equal.value)


@pytest.mark.parametrize(
    "population", [{"events_per_user": 0.5}, {"events_per_user": 11}, {"correlation": 1.0}]
)
def test_users_that_cannot_be_are_refused(population: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be from"):
        Population(**population)
