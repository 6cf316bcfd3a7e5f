"""Figures of a canary's users from outcomes of their rollouts."""

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.feedback.releases import RULES

from etude.common.weights import VersionId
from etude.feedback.experiments.user_moments import compare_arms
from etude.feedback.experiments.verdict import CanaryData
from etude.feedback.release.figures import summarise_arms
from etude.feedback.signals.outcome import RolloutOutcome, SignalState, SignalValue

METRICS = (RULES.canary.primary,)
CANDIDATE = VersionId(1, 41)
NAME, SIGNAL = METRICS[0].name, METRICS[0].signal


def outcome(
    user: str,
    arm: str,
    value: tuple[float, float],
    *,
    experiment: str = "canary-1",
    started_ms: int = 2_000,
    state: SignalState = SignalState.FINAL,
) -> RolloutOutcome:
    return RolloutOutcome(
        rollout="r",
        tenant="acme",
        user=user,
        policy=None,
        arm=arm,
        experiment=experiment,
        started_ms=started_ms,
        values={SIGNAL: SignalValue(*value, state)},
    )


def summarise(*outcomes: RolloutOutcome) -> CanaryData:
    return summarise_arms(
        outcomes, METRICS, experiment="canary-1", candidate=CANDIDATE, started_ms=1_000
    )


def test_what_another_version_served_counts_for_the_arm_and_is_counted() -> None:
    policies = [CANDIDATE, CANDIDATE, VersionId(1, 40), None]
    found = summarise(
        *(
            replace(outcome(f"t{n}", "treatment", (1, 2)), policy=each)
            for n, each in enumerate(policies)
        ),
        replace(outcome("c", "control", (1, 2)), policy=VersionId(1, 40)),
    )
    assert (found.treatment_rollouts, found.substituted_rollouts) == (4, 2)
    assert found.treatment_users == found.moments[NAME][1].users == 4


VALUES = st.tuples(st.integers(0, 5), st.integers(1, 5))


@given(
    st.dictionaries(
        st.sampled_from("abcdef"), st.lists(VALUES, min_size=1, max_size=4), min_size=2
    ),
    st.dictionaries(
        st.sampled_from("uvwxyz"), st.lists(VALUES, min_size=1, max_size=4), min_size=2
    ),
)
def test_a_users_rollouts_are_one_cluster(
    control: Mapping[str, list[tuple[int, int]]], treatment: Mapping[str, list[tuple[int, int]]]
) -> None:
    arms = {"control": control, "treatment": treatment}
    found = summarise(
        *(
            outcome(user, arm, value)
            for arm, users in arms.items()
            for user, values in users.items()
            for value in values
        )
    )
    assert (found.control_users, found.treatment_users) == (len(control), len(treatment))
    difference = compare_arms(*found.moments[NAME])
    expected = []
    for users in arms.values():
        sums = np.array([np.sum(values, axis=0) for values in users.values()], float)
        ratio = sums[:, 0].sum() / sums[:, 1].sum()
        residuals = sums[:, 0] - ratio * sums[:, 1]
        variance = residuals.var(ddof=1) / sums[:, 1].mean() ** 2 / len(sums)
        expected.append((ratio, variance))
    assert float(difference.control) == pytest.approx(expected[0][0])
    assert float(difference.treatment) == pytest.approx(expected[1][0])
    floor = float(difference.value) ** 2 / (len(control) + len(treatment))
    variance = max(expected[0][1] + expected[1][1], floor)
    assert float(difference.variance) == pytest.approx(variance, abs=1e-9)


def test_what_waits_and_what_does_not_concern_the_rollout_does_not_count() -> None:
    found = summarise(
        outcome("a", "control", (1, 1)),
        outcome("a", "control", (9, 9), state=SignalState.WAITING),
        outcome("b", "control", (0, 0)),
        outcome("x", "treatment", (0.5, 1), state=SignalState.CENSORED),
    )
    control, treatment = found.moments[NAME]
    # b is a user of the arm: only the split of users knows that.
    assert (found.control_users, float(control.users)) == (2, 1)
    assert list(control.sums[:2]) == [1, 1]
    assert list(treatment.sums[:2]) == [0.5, 1]


def test_users_of_both_arms_are_in_neither() -> None:
    found = summarise(
        outcome("a", "control", (1, 1)),
        outcome("a", "treatment", (1, 1)),
        outcome("b", "control", (0, 1)),
        outcome("x", "treatment", (1, 1)),
    )
    assert (found.control_users, found.treatment_users, found.users_in_both) == (1, 1, 1)
    assert [float(arm.users) for arm in found.moments[NAME]] == [1, 1]


def test_other_experiments_and_users_outside_of_one_are_no_arm() -> None:
    found = summarise(
        outcome("a", "control", (1, 1), experiment="canary-0"),
        outcome("b", "stable", (1, 1), experiment=""),
    )
    assert (found.control_users, found.treatment_users, dict(found.moments)) == (0, 0, {})


def test_rollouts_before_the_assignment_take_a_users_habits_out_of_the_difference() -> None:
    rng = np.random.default_rng(0)
    habits = rng.uniform(size=400)
    outcomes = []
    for number, habit in enumerate(habits):
        user, arm = f"u{number}", ("control", "treatment")[number % 2]
        gain = 0.05 if number % 2 else 0.0
        noise = rng.normal(scale=0.02)
        outcomes.append(outcome(user, arm, (habit + gain + noise, 1)))
        if number % 10:  # the others are new
            early = outcome(user, "stable", (2 * habit, 2), experiment="", started_ms=10)
            late = outcome(user, "stable", (0, 50), experiment="", started_ms=3_000)
            outcomes += [early, late]
    plain = compare_arms(*summarise(*(each for each in outcomes if each.experiment)).moments[NAME])
    adjusted = compare_arms(*summarise(*outcomes).moments[NAME])
    assert float(adjusted.variance) < float(plain.variance) / 4
    assert math.isclose(
        float(adjusted.value), 0.05, abs_tol=3 * math.sqrt(float(adjusted.variance))
    )
