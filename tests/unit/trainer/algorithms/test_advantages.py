"""What a reward is worth beside its siblings'."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.trainer.algorithms import advantages

GROUPS = np.array([7, 7, 7, 7, 2, 2])
REWARDS = np.array([1.0, 0.0, 0.0, 1.0, 0.3, 0.3])
ALL = np.ones(6, dtype=np.bool_)


def test_the_centred_advantage_is_reward_minus_group_mean() -> None:
    values = advantages.centred_rewards(REWARDS, groups=GROUPS, valid=ALL)
    assert values.tolist() == pytest.approx([0.5, -0.5, -0.5, 0.5, 0, 0])


def test_the_standardised_advantage_is_in_units_of_the_unbiased_spread() -> None:
    values = advantages.normalised_rewards(REWARDS, groups=GROUPS, valid=ALL)
    spread = np.std(REWARDS[:4], ddof=1)
    assert values[:4].tolist() == pytest.approx((REWARDS[:4] - 0.5) / spread, rel=1e-5)
    assert values[4:].tolist() == [0, 0]


def test_leave_one_out_is_reward_minus_the_mean_of_the_siblings() -> None:
    values = advantages.leave_one_out(REWARDS, groups=GROUPS, valid=ALL)
    assert values.tolist() == pytest.approx([2 / 3, -2 / 3, -2 / 3, 2 / 3, 0, 0])


@pytest.mark.parametrize(
    "estimate",
    [advantages.centred_rewards, advantages.normalised_rewards, advantages.leave_one_out],
)
def test_a_masked_rollout_changes_nothing_and_gets_nothing(
    estimate: Callable[..., advantages.Reals],
) -> None:
    valid = np.array([True, True, False, True, True, False])
    rewards = np.where(valid, REWARDS, np.nan)
    values = estimate(rewards, groups=GROUPS, valid=valid)
    without = estimate(
        REWARDS[[0, 1, 3]], groups=np.zeros(3, dtype=np.int64), valid=np.ones(3, dtype=np.bool_)
    )
    assert values[[0, 1, 3]].tolist() == pytest.approx(without.tolist())
    # Two of the last group, one of them masked: the other has no baseline.
    assert values[[2, 4, 5]].tolist() == [0, 0, 0]


def test_a_rollout_without_a_valid_sibling_takes_no_part() -> None:
    valid = np.array([True, True, True, True, True, False])
    assert advantages.takes_part(GROUPS, valid).tolist() == [True] * 4 + [False] * 2


@pytest.mark.parametrize("reward", [0.1, 0.7, 1e6 / 3, -1 / 3])
def test_equal_rewards_give_exactly_zero(reward: float) -> None:
    rewards = np.full(7, reward)
    groups, valid = np.zeros(7, dtype=np.int64), np.ones(7, dtype=np.bool_)
    for estimate in (
        advantages.centred_rewards,
        advantages.normalised_rewards,
        advantages.leave_one_out,
    ):
        assert not estimate(rewards, groups=groups, valid=valid).any()


@given(
    rewards=st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=12),
    shift=st.floats(-1e3, 1e3),
)
def test_advantages_of_a_group_sum_to_zero_and_ignore_a_common_shift(
    rewards: list[float], shift: float
) -> None:
    values = np.array(rewards)
    groups = np.zeros(len(values), dtype=np.int64)
    valid = np.ones(len(values), dtype=np.bool_)
    centred = advantages.centred_rewards(values, groups=groups, valid=valid)
    assert centred.sum() == pytest.approx(0, abs=1e-8)
    shifted = advantages.centred_rewards(values + shift, groups=groups, valid=valid)
    assert shifted == pytest.approx(centred, abs=1e-8)
