"""Users keep their arm, arms are balanced, and a larger share moves no exposed user."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.common.experiments.assignment import MAX_SHARE, Arm, assign_arm

USERS = [f"user-{number}" for number in range(40_000)]
CHI2_LIMIT = 10.83
"""χ² with one degree of freedom, p = 0.001."""
texts = st.text(alphabet=st.characters(codec=None), max_size=20)
shares = st.integers(0, MAX_SHARE)


@given(texts, texts, texts, shares, shares)
def test_a_larger_share_changes_no_exposed_users_arm(
    experiment: str, salt: str, user: str, first: int, second: int
) -> None:
    small, large = sorted((first, second))
    before = assign_arm(experiment, salt, user, small)
    if before is not None:
        assert assign_arm(experiment, salt, user, large) is before


@given(texts, texts, texts)
def test_nobody_is_exposed_at_share_0_and_everyone_at_half(
    experiment: str, salt: str, user: str
) -> None:
    assert assign_arm(experiment, salt, user, 0) is None
    assert assign_arm(experiment, salt, user, MAX_SHARE) is not None


@pytest.mark.parametrize("share", [100, 500, 1_000, 2_500, MAX_SHARE])
def test_arms_are_balanced_inside_the_exposed(share: int) -> None:
    arms = Counter(assign_arm("canary-7", "2026-11", user, share) for user in USERS)
    control, treatment = arms[Arm.CONTROL], arms[Arm.TREATMENT]
    assert (control - treatment) ** 2 / (control + treatment) < CHI2_LIMIT
    expected = len(USERS) * 2 * share / 10_000
    left_out = len(USERS) - expected
    if left_out:
        exposed = control + treatment
        assert (exposed - expected) ** 2 * (1 / expected + 1 / left_out) < CHI2_LIMIT


def test_another_experiment_or_salt_draws_anew_and_independently() -> None:
    first = [assign_arm("canary-7", "2026-11", user, MAX_SHARE) for user in USERS]
    for experiment, salt in (("canary-8", "2026-11"), ("canary-7", "2026-12")):
        second = [assign_arm(experiment, salt, user, MAX_SHARE) for user in USERS]
        same = sum(a is b for a, b in zip(first, second, strict=True))
        assert (2 * same - len(USERS)) ** 2 / len(USERS) < CHI2_LIMIT


def test_lengths_of_texts_count() -> None:
    """Texts that are joined the same way differ."""
    pairs = [
        assign_arm("ab", "c", user, MAX_SHARE) is assign_arm("a", "bc", user, MAX_SHARE)
        for user in USERS[:200]
    ]
    assert 50 < sum(pairs) < 150


def test_the_rule_is_the_one_by_which_users_were_assigned_before() -> None:
    """Another rule would move users between arms in the middle of an experiment."""
    users = [f"user-{number}" for number in range(16)]
    arms = [assign_arm("canary-7", "2026-11", user, 2_500) for user in users]
    letters = "".join("-" if arm is None else arm.value[0] for arm in arms)
    assert letters == "--tct--tcc-t-tcc"


@pytest.mark.parametrize("share", [-1, MAX_SHARE + 1])
def test_a_share_beyond_half_is_refused(share: int) -> None:
    with pytest.raises(ValueError, match="share must be from 0 to 5000"):
        assign_arm("canary-7", "2026-11", "user", share)
