"""Scores: tasks weigh the same, and best-of-K is the mean over all subsets."""

import itertools
import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.common.errors import InvalidFieldError
from etude.common.evaluation.scores import best_of_k, expected_best, mean_at_n

VALUES = st.lists(st.integers(-20, 20).map(float), min_size=1, max_size=7)


@given(values=VALUES, data=st.data())
def test_the_expected_best_is_the_mean_over_all_subsets(
    values: list[float], data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, len(values)))
    bests = [max(subset) for subset in itertools.combinations(values, k)]
    assert expected_best(values, k=k) == pytest.approx(statistics.fmean(bests))


@given(total=st.integers(1, 200), data=st.data())
def test_for_zeros_and_ones_it_is_pass_at_k(total: int, data: st.DataObject) -> None:
    right, k = data.draw(st.integers(0, total)), data.draw(st.integers(1, total))
    values = [1.0] * right + [0.0] * (total - right)
    known = 1 - math.comb(total - right, k) / math.comb(total, k)
    assert expected_best(values, k=k) == pytest.approx(known)


@given(values=VALUES)
def test_more_samples_never_have_a_worse_best(values: list[float]) -> None:
    bests = [expected_best(values, k=k) for k in range(1, len(values) + 1)]
    assert bests == pytest.approx(sorted(bests))
    assert bests[0] == pytest.approx(statistics.fmean(values))
    assert bests[-1] == pytest.approx(max(values))


def test_a_task_with_more_samples_weighs_no_more_than_another() -> None:
    assert mean_at_n({"a": [1.0], "b": [0.0] * 9}) == pytest.approx(0.5)
    assert best_of_k({"a": [1.0, 0.0], "b": [0.0] * 9}, k=2) == pytest.approx(0.5)


def test_a_task_with_too_few_samples_is_named() -> None:
    with pytest.raises(InvalidFieldError, match="samples of task b"):
        best_of_k({"a": [1.0, 0.0], "b": [0.0]}, k=2)
    with pytest.raises(InvalidFieldError, match="hold no task"):
        mean_at_n({})
