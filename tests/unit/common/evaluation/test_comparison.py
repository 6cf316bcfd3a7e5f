"""Comparison by task: the exact bootstrap, its laws, and how often its bound is right."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.common.errors import InvalidFieldError
from etude.common.evaluation.comparison import PairedDifference
from etude.common.evaluation.comparison import compare_by_task as compare

Values = dict[str, list[float]]
VALUES = st.dictionaries(
    st.text("abcdef", min_size=1, max_size=3),
    st.lists(st.integers(-8, 8).map(lambda n: n / 8), min_size=1, max_size=3),
    min_size=6,
    max_size=12,
)


def compare_by_task(candidate: Values, served: Values, *, seed: int = 0) -> PairedDifference:
    return compare(candidate, served, largest_change=1.0, seed=seed)


def test_bounds_are_those_of_all_resamples() -> None:
    differences = [0.9, -0.3, 0.4, 0.1, -0.7, 0.2]
    middle = sum(differences) / 6
    means = [sum(drawn) / 6 for drawn in itertools.product(differences, repeat=6)]
    wide = [middle + (mean - middle) * math.sqrt(6 / 5) for mean in means]
    found = compare_by_task(
        {f"{n}": [each] for n, each in enumerate(differences)}, {f"{n}": [0.0] for n in range(6)}
    )
    assert found.difference == pytest.approx(middle)
    # 10,000 resamples: the 5 % quantile moves by about 0.01 from seed to seed.
    assert [found.low, found.high] == pytest.approx(np.quantile(wide, [0.05, 0.95]), abs=0.04)


@settings(max_examples=15)
@given(first=VALUES, second=VALUES)
def test_exchanging_the_policies_turns_the_difference_around(first: Values, second: Values) -> None:
    second |= {task: [0.25] for task in first}
    one = compare_by_task(first, second)
    assert one.low <= one.difference <= one.high
    other = compare_by_task(second, first).negate()
    assert (one.num_tasks, one.num_unpaired) == (other.num_tasks, other.num_unpaired)
    assert [one.difference, one.low, one.high] == pytest.approx(
        [other.difference, other.low, other.high]
    )


@settings(max_examples=15)
@given(first=VALUES, data=st.data())
def test_neither_the_order_of_tasks_nor_tasks_of_one_policy_change_a_difference(
    first: Values, data: st.DataObject
) -> None:
    second = {task: [0.0] for task in first}
    order = data.draw(st.permutations(sorted(first)))
    found = compare_by_task(first, second)
    assert compare_by_task({task: first[task] for task in order}, second) == found
    more = compare_by_task(first, second | {"only here": [1.0]})
    assert (more.difference, more.low, more.num_unpaired) == (found.difference, found.low, 1)


def test_the_lower_bound_is_above_the_truth_in_about_one_case_of_twenty() -> None:
    random = np.random.default_rng(5)
    repeats, too_high = 120, 0
    for repeat in range(repeats):
        # Two samples of 60 tasks of unlike difficulty; the candidate solves 5 points more.
        ease = random.uniform(0.05, 0.9, size=60)
        solved = random.random((60, 2)) < (ease + 0.05)[:, None]
        before = random.random((60, 2)) < ease[:, None]
        found = compare_by_task(
            {f"{n}": row.astype(float).tolist() for n, row in enumerate(solved)},
            {f"{n}": row.astype(float).tolist() for n, row in enumerate(before)},
            seed=repeat,
        )
        too_high += found.low > 0.05
    # Binomial(120, 0.05) is above 13 in fewer than one seed of a hundred.
    assert 1 <= too_high <= 13


def test_equal_policies_on_few_tasks_are_not_known_to_be_equal() -> None:
    same: Values = {f"{n}": [1.0] for n in range(100)}
    found = compare_by_task(same, same)
    assert (found.difference, found.low, found.high) == pytest.approx((0.0, -0.03, 0.03))
    one_worse = compare_by_task(same | {"0": [0.0]}, same)
    assert one_worse.low == pytest.approx(-0.0474)


def test_what_cannot_be_compared_is_refused_by_name() -> None:
    with pytest.raises(InvalidFieldError, match="no task in common"):
        compare_by_task({"a": [1.0]}, {"b": [1.0]})
    with pytest.raises(InvalidFieldError, match="not finite"):
        compare_by_task({"a": [math.nan]}, {"a": [1.0]})
