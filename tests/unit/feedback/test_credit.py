"""Credit: users are the unit, none is compared with itself, and none moves more than the cap."""

import math
import statistics
from collections import defaultdict

import hypothesis.strategies as st
import pytest
from hypothesis import given

from etude.feedback.credit import (
    MAX_ADVANTAGE,
    MEDIAN_USERS,
    USER_SHARE,
    baselines,
    credit_rewards,
    lowest_reward,
    reward_rollouts,
    weigh_users,
)
from etude.feedback.ledger.user_keys import UserId
from etude.feedback.signals.outcome import RolloutOutcome, SignalState, SignalValue

REWARDS = st.floats(-20, 20)
ROWS = st.lists(
    st.tuples(REWARDS, st.integers(0, 80), st.sampled_from(["x", "y"])), min_size=1, max_size=300
)


def user(number: int) -> UserId:
    return UserId("acme", f"{number:032x}")


def masses(advantages: list[float], users: list[UserId]) -> dict[UserId, float]:
    found: dict[UserId, float] = defaultdict(float)
    for advantage, each in zip(advantages, users, strict=True):
        found[each] += abs(advantage)
    return found


@given(rows=ROWS)
def test_no_user_has_more_than_the_cap(rows: list[tuple[float, int, str]]) -> None:
    rewards, numbers, strata = (list(column) for column in zip(*rows, strict=True))
    users = [user(number) for number in numbers]
    credited = credit_rewards(rewards, users, strata)
    found = masses([each.advantage for each in credited], users)
    positive = sorted(mass for mass in found.values() if mass > 0)
    if not positive:
        return
    limit = MEDIAN_USERS * statistics.median_low(positive)
    if len(positive) >= 1 / USER_SHARE:
        limit = min(limit, USER_SHARE * math.fsum(positive))
    assert max(positive) <= limit * (1 + 1e-9)
    for each, owner in zip(credited, users, strict=True):
        assert abs(each.advantage) <= MAX_ADVANTAGE / math.sqrt(users.count(owner)) + 1e-12


@given(rows=ROWS)
def test_weights_do_not_shrink_users_below_the_cap(rows: list[tuple[float, int, str]]) -> None:
    """As an independent check: the cap found by bisection gives the same weights."""
    values = [max(-3.0, min(3.0, value)) for value, _, _ in rows]
    users = [user(number) for _, number, _ in rows]
    raw = {
        each: mass / math.sqrt(users.count(each)) for each, mass in masses(values, users).items()
    }
    positive = [mass for mass in raw.values() if mass > 0]
    low, high = 0.0, MEDIAN_USERS * statistics.median_low(positive) if positive else 0.0
    if len(positive) * USER_SHARE >= 1:
        for _ in range(200):
            middle = (low + high) / 2
            total = math.fsum(min(mass, middle) for mass in positive)
            low, high = (middle, high) if middle <= USER_SHARE * total + 1e-12 else (low, middle)
    for each, weight in weigh_users(values, users).items():
        expected = min(raw[each], high)
        assert weight * math.sqrt(users.count(each)) * raw[each] == pytest.approx(
            expected, rel=1e-6, abs=1e-6
        )


@given(rows=ROWS, changed=REWARDS)
def test_a_users_own_rollouts_never_enter_the_users_baseline(
    rows: list[tuple[float, int, str]], changed: float
) -> None:
    rewards, numbers, strata = (list(column) for column in zip(*rows, strict=True))
    users = [user(number) for number in numbers]
    mine = [place for place, each in enumerate(users) if each == users[0]]
    if len(set(users)) == 1:
        assert baselines(rewards, users, strata) == rewards
        return
    other = [changed if place in mine else reward for place, reward in enumerate(rewards)]
    before, after = baselines(rewards, users, strata), baselines(other, users, strata)
    for place in mine:
        assert before[place] == pytest.approx(after[place], abs=1e-9)


@given(rows=ROWS)
def test_a_baseline_is_the_mean_of_the_other_users_means_each_near_their_median(
    rows: list[tuple[float, int, str]],
) -> None:
    found = baselines(*(list(column) for column in zip(*as_columns(rows), strict=True)))
    for place, (reward, mine, stratum) in enumerate(rows):
        members = {u for _, u, s in rows if s == stratum}
        is_large = len(members) >= 3
        others = (members if is_large else {u for _, u, _ in rows}) - {mine}
        means = [
            statistics.fmean(r for r, u, s in rows if u == each and (s == stratum or not is_large))
            for each in others
        ]
        centre = statistics.median_low(means) if means else reward
        cut = [max(centre - MAX_ADVANTAGE, min(centre + MAX_ADVANTAGE, each)) for each in means]
        expected = statistics.fmean(cut) if means else reward
        assert found[place] == pytest.approx(expected, abs=1e-9)


def as_columns(rows: list[tuple[float, int, str]]) -> list[tuple[float, UserId, str]]:
    return [(reward, user(number), stratum) for reward, number, stratum in rows]


def outcome(number: int, name: str, value: SignalValue) -> RolloutOutcome:
    return RolloutOutcome(
        rollout=f"{number:032x}",
        tenant="acme",
        user=user(number).digest,
        policy=None,
        arm="",
        experiment="",
        started_ms=0,
        values={name: value},
    )


def test_a_reward_adds_up_centred_and_scaled_signals() -> None:
    values = [0.0, 0.0, 1.0, 1.0]
    outcomes = [outcome(n, "x", SignalValue(value, 1)) for n, value in enumerate(values)]
    assert reward_rollouts(outcomes, {"x": 2.0}) == [-2.0, -2.0, 2.0, 2.0]
    assert lowest_reward({"x": 2.0, "y": -1.0}) == -9.0


def test_many_rollouts_of_one_user_do_not_move_what_a_signal_is_compared_with() -> None:
    values = [(n, float(n % 2)) for n in range(10)]
    flood = [(99, 1.0)] * 500
    outcomes = [outcome(n, "x", SignalValue(value, 1)) for n, value in [*values, *flood]]
    alone = [outcome(n, "x", SignalValue(value, 1)) for n, value in [*values, (99, 1.0)]]
    flooded, calm = (reward_rollouts(each, {"x": 1.0}) for each in (outcomes, alone))
    assert flooded[:10] == pytest.approx(calm[:10])


def test_signals_that_are_silent_waiting_or_equal_add_nothing() -> None:
    outcomes = [outcome(n, "x", SignalValue(n, 0)) for n in range(4)]
    assert reward_rollouts(outcomes, {"x": 1.0}) == [0.0] * 4
    waiting = [outcome(n, "x", SignalValue(n, 1, SignalState.WAITING)) for n in range(4)]
    assert reward_rollouts(waiting, {"x": 1.0}) == [0.0] * 4
    equal = [outcome(n, "x", SignalValue(0.3, 1)) for n in range(4)]
    assert reward_rollouts(equal, {"x": 1.0}) == [0.0] * 4
