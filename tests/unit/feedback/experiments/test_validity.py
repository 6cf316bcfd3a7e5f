"""Arms that cannot be compared are told from those that can."""

import math

import numpy as np
import pytest

from etude.feedback.experiments.verdict import SPLIT_ALPHA, find_invalidity, split_p_value


def test_an_even_split_is_valid() -> None:
    assert find_invalidity(10_050, 9_950, 0) is None
    assert find_invalidity(0, 0, 0) is None


def test_a_split_that_chance_does_not_explain_is_named_with_its_probability() -> None:
    assert find_invalidity(10_400, 9_600, 0) == (
        "the arms have 10,400 and 9,600 users, which an even split ever reaches with p = 2e-06"
    )


def test_users_who_were_served_both_arms_are_counted() -> None:
    assert find_invalidity(4_950, 4_950, 99) is None
    assert find_invalidity(4_950, 4_950, 101) == "101 of 10,001 users were served both arms"


@pytest.mark.parametrize("users", [1, 2, 30, 200])
def test_the_evidence_against_an_even_split_is_one_on_average(users: int) -> None:
    """Over all splits, where it is above 1 and not cut: the law that bounds its level."""
    splits = [(count, users - count) for count in range(users + 1)]
    evidence = [1 / split_p_value(*split) for split in splits]
    weights = [math.comb(users, split[0]) / 2**users for split in splits]
    mean = sum(w * e for w, e in zip(weights, evidence, strict=True))
    cut = sum(w for w, e in zip(weights, evidence, strict=True) if e == 1)
    assert mean - cut <= 1 <= mean


def test_an_even_split_is_refused_at_any_of_ten_thousand_looks_less_often_than_stated() -> None:
    """Exact: the probabilities of all counts that were never refused, user by user.

    Pearson's chi-squared test with the same level refuses 31 times as often.
    """
    alive, first, refused, fewest = np.ones(1), 0, 0.0, 0
    for users in range(1, 10_001):
        alive = (np.append(alive, 0) + np.append(0, alive)) / 2
        while split_p_value(fewest, users - fewest) < SPLIT_ALPHA:
            fewest += 1
        counts = first + np.arange(len(alive))
        is_valid = (counts >= fewest) & (users - counts >= fewest)
        refused += float(alive[~is_valid].sum())
        alive, first = alive[is_valid], max(first, fewest)
    assert 0.0005 < refused <= SPLIT_ALPHA
