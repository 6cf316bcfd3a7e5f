"""Rank correlation, by its definition and known cases."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.common.evaluation.rank_correlation import correlate_ranks, rank_values, spearman


@given(st.integers(2, 30).flatmap(lambda size: st.permutations(range(size))))
def test_of_distinct_values_it_is_the_formula_of_squared_differences(order: list[int]) -> None:
    size = len(order)
    squares = sum((place - rank) ** 2 for place, rank in enumerate(order))
    expected = 1 - 6 * squares / (size * (size**2 - 1))
    assert spearman(range(size), [10 * rank**3 for rank in order]) == pytest.approx(expected)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=40))
def test_equal_values_share_the_mean_of_their_ranks(values: list[int]) -> None:
    ranks = rank_values(values)
    for value, rank in zip(values, ranks, strict=True):
        less, equal = sum(v < value for v in values), values.count(value)
        assert rank == less + (equal + 1) / 2


def test_ties_count_as_published() -> None:
    # IQ against hours of television, and a case with ties worked out by hand: r = 2 / sqrt(5).
    iq = [106, 100, 86, 101, 99, 103, 97, 113, 112, 110]
    hours = [7, 27, 2, 50, 28, 29, 20, 12, 6, 17]
    assert spearman(iq, hours) == pytest.approx(-29 / 165)
    assert spearman([1, 1, 2, 2], [1, 2, 3, 4]) == pytest.approx(2 / 5**0.5)


def test_a_figure_that_never_differs_has_no_correlation() -> None:
    assert spearman([1, 1, 1], [1, 2, 3]) is None
    assert spearman([1], [1]) is None
    assert correlate_ranks([1, 1], [1, 2]) is None


def test_the_interval_holds_the_value_and_narrows_with_more_pairs() -> None:
    few, many = ([each % 7 + each / 5 for each in range(size)] for size in (12, 120))
    short = correlate_ranks(list(range(12)), few)
    long = correlate_ranks(list(range(120)), many)
    assert short is not None
    assert long is not None
    assert short.low <= short.value <= short.high <= 1
    assert long.high - long.low < short.high - short.low
