"""Colluding users have no larger part of an update than their caps allow together."""

import pytest
from tests.support.feedback.credit_simulation import simulate_poisoning


@pytest.mark.parametrize("rollouts_each", [1, 5, 100])
def test_ten_of_400_users_move_the_gradient_by_at_most_their_cap(rollouts_each: int) -> None:
    found = simulate_poisoning(num_users=400, num_colluding=10, rollouts_each=rollouts_each, seed=1)
    assert found.cap < 0.1
    assert found.weight <= found.cap
    own = found.weight * found.distance
    assert found.displacement == pytest.approx(own, abs=found.shift + 1e-12)
    # The means and spreads with which others are compared shift for all of them alike.
    assert found.shift <= 0.01 * found.cap


def test_users_who_praise_by_every_signal_do_not_make_the_rest_look_bad() -> None:
    found = simulate_poisoning(
        num_users=400, num_colluding=10, rollouts_each=5, seed=1, num_signals=8
    )
    # Their rewards are up to 24; uncut they would pull by 0.27.
    assert found.pull < 0.1
    assert found.weight <= found.cap


def test_without_weights_the_same_users_would_have_most_of_it() -> None:
    found = simulate_poisoning(num_users=400, num_colluding=10, rollouts_each=100, seed=1)
    assert found.uncapped > 0.5 > 5 * found.weight
