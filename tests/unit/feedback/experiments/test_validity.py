"""Arms that cannot be compared are told from those that can."""

import math

import pytest

from etude.feedback.experiments.validity import find_invalidity, split_p_value


def test_an_even_split_is_valid() -> None:
    assert find_invalidity(10_050, 9_950, 0) is None
    assert find_invalidity(0, 0, 0) is None


def test_a_split_that_chance_does_not_explain_is_named_with_its_probability() -> None:
    assert find_invalidity(10_400, 9_600, 0) == (
        "the arms have 10,400 and 9,600 users, which an even split has with p = 2e-08"
    )


def test_users_who_were_served_both_arms_are_counted() -> None:
    assert find_invalidity(4_950, 4_950, 99) is None
    assert find_invalidity(4_950, 4_950, 101) == "101 of 10,001 users were served both arms"


@pytest.mark.parametrize("control", [0, 3, 10, 17, 20])
def test_the_probability_is_that_of_a_normal_split(control: int) -> None:
    """Two-sided, of a binomial count with mean 10 and variance 5."""
    expected = math.erfc(abs(control - 10) / math.sqrt(5) / math.sqrt(2))
    assert split_p_value(control, 20 - control) == pytest.approx(expected)
