"""Evasions: questions and broken calls are never worth more than the work that they avoid."""

import statistics

import hypothesis.strategies as st
import pytest
from hypothesis import given

from etude.common.feedback.windows import RolloutCounts
from etude.common.weights import VersionId
from etude.feedback.credit import credit_rewards, lowest_reward
from etude.feedback.evasions import find_evasions, lower_evasions, price_evasions
from etude.feedback.ledger.user_keys import UserId
from etude.feedback.signals.outcome import RolloutOutcome, SignalValue

WEIGHTS = {"deferral": -0.5, "broken_tool_call": -1.0}
WORK, QUESTION, BROKEN = "", "deferral", "broken_tool_call"
PRICE = 2.0
"""Twice the larger weight."""


def users(count: int) -> list[UserId]:
    return [UserId("acme", f"{number:032x}") for number in range(count)]


def outcome(deferral: SignalValue) -> RolloutOutcome:
    return RolloutOutcome(
        rollout="r",
        tenant="acme",
        user="u",
        policy=VersionId(1, 1),
        arm="",
        experiment="",
        started_ms=1,
        values={"deferral": deferral},
    )


ROWS = st.lists(
    st.tuples(st.floats(-4, 4), st.sampled_from([WORK, QUESTION, BROKEN]), st.booleans()),
    min_size=6,
    max_size=120,
)


@given(rows=ROWS)
def test_evasions_have_no_positive_advantage_in_the_mean(
    rows: list[tuple[float, str, bool]],
) -> None:
    rewards, kinds, edited = (list(column) for column in zip(*rows, strict=True))
    if sum(not kind for kind in kinds) < 4:
        return
    people, strata = users(len(rows)), ["acme/x"] * len(rows)
    edited = [edit and not kind for edit, kind in zip(edited, kinds, strict=True)]
    lowered = lower_evasions(
        rewards, people, strata, evasions=kinds, has_edits=edited, weights=WEIGHTS
    )
    credited = credit_rewards(lowered, people, strata)
    evading = [each.reward for each, kind in zip(credited, kinds, strict=True) if kind]
    working = [each.reward for each, kind in zip(credited, kinds, strict=True) if not kind]
    assert working == [reward for reward, kind in zip(rewards, kinds, strict=True) if not kind]
    if evading:
        # Up to what one user, who is left out of the own worth, adds to a mean.
        slack = 8 / len(working)
        assert statistics.fmean(evading) <= statistics.fmean(working) - PRICE + slack


def test_where_work_earns_complaints_a_question_that_earns_none_is_worth_less() -> None:
    """Of 80 users 68 are asked; those who got work complain, and the others do not mind."""
    rewards, kinds = [0.3] * 68 + [-0.8] * 12, [QUESTION] * 68 + [WORK] * 12
    people, strata = users(80), ["acme/x"] * 80
    before = credit_rewards(rewards, people, strata)
    assert before[0].advantage > 0 > before[-1].advantage
    lowered = lower_evasions(
        rewards, people, strata, evasions=kinds, has_edits=[False] * 80, weights=WEIGHTS
    )
    after = credit_rewards(lowered, people, strata)
    assert lowered[0] == pytest.approx(-2.8)
    assert after[0].advantage < 0 < after[-1].advantage


def test_work_that_gave_up_does_not_make_a_question_cheap_nor_edits_make_it_dear() -> None:
    rewards = [1.0, 1.0, 1.0, -2.0, -2.0, -2.0, 0.9]
    edited = [True, True, True, False, False, False, False]
    kinds = [WORK] * 6 + [QUESTION]
    lowered = lower_evasions(
        rewards, users(7), ["s"] * 7, evasions=kinds, has_edits=edited, weights=WEIGHTS
    )
    assert lowered[-1] == pytest.approx(-0.5 - PRICE)
    # Bad edits count as they are: a question is worth less than them, too.
    rewards[:3] = [-3.0] * 3
    lowered = lower_evasions(
        rewards, users(7), ["s"] * 7, evasions=kinds, has_edits=edited, weights=WEIGHTS
    )
    assert lowered[-1] == pytest.approx(-3.0 - PRICE)


def test_questions_keep_their_differences() -> None:
    """A question that its user liked is worth more than one that annoyed, and both pay."""
    rewards, kinds = [1.0, 0.0, 0.5, 0.2, 0.2, 0.2], [QUESTION] * 3 + [WORK] * 3
    lowered = lower_evasions(
        rewards, users(6), ["s"] * 6, evasions=kinds, has_edits=[False] * 6, weights=WEIGHTS
    )
    assert lowered == pytest.approx([-1.3, -2.3, -1.8, 0.2, 0.2, 0.2])
    # Questions that earn less than that by themselves stay as they are.
    again = lower_evasions(
        lowered, users(6), ["s"] * 6, evasions=kinds, has_edits=[False] * 6, weights=WEIGHTS
    )
    assert again == pytest.approx(lowered)


def test_where_nobody_works_all_evasions_are_worth_the_same() -> None:
    rewards, kinds = [0.5, -0.5, 0.1, 0.2], [QUESTION, BROKEN, QUESTION, BROKEN]
    lowered = lower_evasions(
        rewards, users(4), ["s"] * 4, evasions=kinds, has_edits=[False] * 4, weights=WEIGHTS
    )
    assert lowered == [lowest_reward(WEIGHTS)] * 4


def test_prices_are_those_of_the_signals_and_a_weight_of_zero_has_none() -> None:
    asks, works, free = (SignalValue(*each) for each in ((1, 1), (0, 1), (1, 0)))
    cases = [
        (asks, RolloutCounts(is_question=True), QUESTION),
        (works, RolloutCounts(calls=4, broken_calls=2), BROKEN),
        (works, RolloutCounts(calls=9, broken_calls=1), BROKEN),
        (works, RolloutCounts(calls=4, broken_calls=3, edits=1), WORK),
        (asks, RolloutCounts(calls=1, broken_calls=1, is_question=True), BROKEN),
        (free, RolloutCounts(is_question=True), WORK),
    ]
    outcomes, counts = [outcome(each) for each, _, _ in cases], [each for _, each, _ in cases]
    assert find_evasions(outcomes, counts, WEIGHTS) == [kind for _, _, kind in cases]
    naive = {"deferral": 0.0, "dissatisfied_followup": -1.0}
    assert find_evasions(outcomes, counts, naive) == [""] * len(cases)
    assert price_evasions(naive) == 0.0
    assert price_evasions(WEIGHTS) == PRICE


def test_a_policy_gains_nothing_by_asking_in_place_of_breaking_calls() -> None:
    rewards = [0.0] * 4 + [-2.5, -3.5] * 2 + [-1.0, 0.0] * 2
    kinds = [WORK] * 4 + [BROKEN] * 4 + [QUESTION] * 4
    lowered = lower_evasions(
        rewards, users(12), ["s"] * 12, evasions=kinds, has_edits=[False] * 12, weights=WEIGHTS
    )
    assert statistics.fmean(lowered[4:8]) == statistics.fmean(lowered[8:]) == -3.0
    # One rollout is no measure of its kind.
    rewards, kinds = [0.0] * 4 + [-9.0] + [-1.0, 0.0] * 2, [WORK] * 4 + [BROKEN] + [QUESTION] * 4
    lowered = lower_evasions(
        rewards, users(9), ["s"] * 9, evasions=kinds, has_edits=[False] * 9, weights=WEIGHTS
    )
    assert statistics.fmean(lowered[5:]) == -PRICE
