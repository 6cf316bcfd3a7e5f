"""Verdicts on a candidate, with the sentences that people read."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.feedback.experiments.user_moments import UserMoments
from etude.feedback.experiments.verdict import (
    CanaryAction,
    CanaryData,
    CanaryMetric,
    CanaryPlan,
    decide_canary,
)

PERSISTENCE = CanaryMetric(name="edit persistence", relevant=0.0137)
ERRORS = CanaryMetric(name="error rate", relevant=0.01, is_higher_better=False)
LATENCY = CanaryMetric(name="latency", relevant=0.2, is_higher_better=False, unit="s")
PLAN = CanaryPlan(
    primary=PERSISTENCE, guardrails=(ERRORS,), signals=(LATENCY,), users_per_arm=20_000
)


def share(successes: int, users: int) -> UserMoments:
    """Users with one event each."""
    return UserMoments.from_users(np.arange(users) < successes)


def seconds(mean: float, users: int) -> UserMoments:
    """Users with a mean, half of them a second above it and half below."""
    return UserMoments.from_users(mean + np.where(np.arange(users) % 2, 1.0, -1.0))


def canary(
    users: int = 4_000,
    *,
    kept: tuple[float, float] = (0.6, 0.6),
    errors: tuple[float, float] = (0.02, 0.02),
    latency: tuple[float, float] = (2.0, 2.0),
) -> CanaryData:
    """As many users in each arm, with shares and means of control and treatment."""
    return CanaryData(
        control_users=users,
        treatment_users=users,
        moments={
            "edit persistence": (
                share(round(kept[0] * users), users),
                share(round(kept[1] * users), users),
            ),
            "error rate": (
                share(round(errors[0] * users), users),
                share(round(errors[1] * users), users),
            ),
            "latency": (seconds(latency[0], users), seconds(latency[1], users)),
        },
    )


SENTENCES = [
    (
        canary(1_607, errors=(0.02, 0.045)),
        CanaryAction.ROLLBACK,
        "rolled back: error rate +2.5 points, 99 % interval [0.1, 4.9], 3,214 users",
    ),
    (
        canary(20_000, kept=(0.6, 0.6137)),
        CanaryAction.PROMOTE,
        "promoted: edit persistence +1.4 points, 95 % interval [0.4, 2.3], 40,000 users",
    ),
    (
        canary(20_000, kept=(0.6, 0.58)),
        CanaryAction.ROLLBACK,
        "rolled back: edit persistence -2.0 points, 95 % interval [-3.0, -1.0], 40,000 users",
    ),
    (
        canary(latency=(2.0, 2.3)),
        CanaryAction.PAUSE,
        "paused for a person: latency +0.3 s, 99 % interval [0.217, 0.383], 8,000 users",
    ),
    (
        canary(kept=(0.6, 0.61)),
        CanaryAction.CONTINUE,
        "continues: edit persistence +1.0 points, 95 % interval [-4.3, 6.3], 8,000 "
        "users, 20 % of those planned",
    ),
    (
        canary(150),
        CanaryAction.NOT_ENOUGH_DATA,
        "not enough data: edit persistence has 150 of the 200 users an arm below "
        "which nothing is decided",
    ),
    (
        canary(20_000, kept=(0.6, 0.603)),
        CanaryAction.NOT_ENOUGH_DATA,
        "not enough data: edit persistence +0.3 points, 95 % interval [-0.7, 1.3], "
        "40,000 users, and no more are planned",
    ),
    (
        replace(canary(), control_users=4_400),
        CanaryAction.INVALID,
        "invalid: the arms have 4,400 and 4,000 users, which an even split ever reaches with"
        " p = 0.0008",
    ),
    (
        replace(
            canary(20_000, kept=(0.6, 0.65)), treatment_rollouts=40_000, substituted_rollouts=2_001
        ),
        CanaryAction.NOT_ENOUGH_DATA,
        "not enough data: another version served 2,001 of 40,000 rollouts of the candidate's users",
    ),
    (
        replace(canary(), users_in_both=100),
        CanaryAction.INVALID,
        "invalid: 100 of 8,100 users were served both arms",
    ),
]


@pytest.mark.parametrize(("data", "action", "sentence"), SENTENCES)
def test_a_verdict_says_what_was_decided_and_by_which_figures(
    data: CanaryData, action: CanaryAction, sentence: str
) -> None:
    found = decide_canary(PLAN, data)
    assert (found.action, found.sentence) == (action, sentence)


@pytest.mark.parametrize("data", [case[0] for case in SENTENCES])
def test_the_evidence_is_json(data: CanaryData) -> None:
    evidence = decide_canary(PLAN, data).evidence
    assert json.loads(json.dumps(evidence, allow_nan=False)) == evidence


def test_harm_rolls_back_also_where_another_version_served_a_part() -> None:
    data = replace(
        canary(20_000, errors=(0.02, 0.03)), treatment_rollouts=40_000, substituted_rollouts=9_000
    )
    assert decide_canary(PLAN, data).action is CanaryAction.ROLLBACK


def test_a_guardrail_rolls_back_before_a_signal_asks_and_before_a_gain_promotes() -> None:
    data = canary(20_000, kept=(0.6, 0.65), errors=(0.02, 0.03), latency=(2.0, 2.5))
    assert decide_canary(PLAN, data).action is CanaryAction.ROLLBACK
    data = canary(20_000, kept=(0.6, 0.65), latency=(2.0, 2.5))
    assert decide_canary(PLAN, data).action is CanaryAction.PAUSE
    data = canary(20_000, kept=(0.6, 0.65), errors=(0.03, 0.02), latency=(2.5, 2.0))
    assert decide_canary(PLAN, data).action is CanaryAction.PROMOTE


@pytest.mark.parametrize("name", ["edit persistence", "error rate"])
def test_nothing_is_promoted_while_the_primary_metric_or_a_guardrail_lacks_data(name: str) -> None:
    data = canary(20_000, kept=(0.6, 0.65))
    without = {key: value for key, value in data.moments.items() if key != name}
    found = decide_canary(PLAN, replace(data, moments=without))
    assert found.action is CanaryAction.NOT_ENOUGH_DATA
    assert found.sentence.startswith(f"not enough data: {name} has 0 of the 200 users an arm")


def test_an_arm_without_an_event_decides_nothing() -> None:
    users = np.zeros(4_000)
    quiet = UserMoments.from_users(users, users)
    data = canary()
    moments = dict(data.moments) | {"error rate": (quiet, quiet)}
    found = decide_canary(PLAN, replace(data, moments=moments))
    assert found.action is CanaryAction.NOT_ENOUGH_DATA


def test_each_look_spends_alpha_and_the_next_one_knows() -> None:
    first = decide_canary(PLAN, canary(4_000, kept=(0.6, 0.61)))
    assert first.looks == (0.2,)
    data = replace(canary(8_000, kept=(0.6, 0.61)), looks=first.looks)
    assert decide_canary(PLAN, data).looks == (0.2, 0.4)


def test_a_second_look_at_the_same_users_is_none() -> None:
    data = replace(canary(20_000, kept=(0.6, 0.65)), looks=(0.5, 1.0))
    found = decide_canary(PLAN, data)
    assert (found.action, found.looks) == (CanaryAction.NOT_ENOUGH_DATA, (0.5, 1.0))


def test_the_last_look_of_a_canary_that_ends_early_may_spend_what_is_left() -> None:
    data = canary(10_000, kept=(0.6, 0.6149))
    assert decide_canary(PLAN, data).action is CanaryAction.CONTINUE
    assert decide_canary(PLAN, replace(data, is_final=True)).action is CanaryAction.PROMOTE


@given(
    st.integers(0, 4_000),
    st.integers(0, 4_000),
    st.integers(0, 4_000),
    st.integers(0, 4_000),
)
def test_arms_that_change_places_change_promotion_into_roll_back(
    kept: int, kept_by_candidate: int, errors: int, errors_of_candidate: int
) -> None:
    plan = replace(PLAN, signals=())
    rates = (
        (kept / 4_000, kept_by_candidate / 4_000),
        (errors / 4_000, errors_of_candidate / 4_000),
    )
    found = decide_canary(plan, canary(kept=rates[0], errors=rates[1])).action
    swapped = decide_canary(plan, canary(kept=rates[0][::-1], errors=rates[1][::-1])).action
    if found is CanaryAction.PROMOTE:
        assert swapped is CanaryAction.ROLLBACK
    if errors == errors_of_candidate and found is CanaryAction.ROLLBACK:
        assert swapped is CanaryAction.PROMOTE
    if (kept, errors) == (kept_by_candidate, errors_of_candidate):
        assert found is CanaryAction.CONTINUE


@pytest.mark.parametrize(
    "change",
    [
        {"users_per_arm": 100},
        {"min_users": 1},
        {"alpha": 0.0},
        {"guardrail_alpha": 0.5},
    ],
)
def test_a_plan_that_cannot_decide_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"min_users|alpha"):
        replace(PLAN, **change)


def test_a_metric_without_a_difference_that_matters_is_refused() -> None:
    with pytest.raises(ValueError, match="error rate: relevant must be above 0"):
        CanaryMetric(name="error rate", relevant=0.0)
