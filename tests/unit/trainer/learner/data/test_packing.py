"""Best-fit packing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.trainer.learner.data.windows import fill_ratio, pack_best_fit

CAPACITY = 100
LENGTHS = st.lists(st.integers(1, CAPACITY), max_size=200)


@given(LENGTHS)
def test_each_sequence_is_in_one_row_and_no_row_is_too_long(lengths: list[int]) -> None:
    rows = pack_best_fit(lengths, capacity=CAPACITY)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in row) <= CAPACITY for row in rows)


@given(LENGTHS)
def test_no_two_rows_would_fit_into_one(lengths: list[int]) -> None:
    rows = pack_best_fit(lengths, capacity=CAPACITY)
    totals = sorted(sum(lengths[index] for index in row) for row in rows)
    assert len(totals) < 2 or totals[0] + totals[1] > CAPACITY


def test_rows_of_texts_are_at_least_99_percent_full() -> None:
    # Lengths as texts have them: most are short, some are cut at the capacity.
    lengths = [min(4_096, 1 + (index * 7_919) % 700 * (1 + index % 17)) for index in range(4_000)]
    rows = pack_best_fit(lengths, capacity=4_096)
    assert fill_ratio(rows, lengths, capacity=4_096) >= 0.99


def test_a_sequence_longer_than_a_row_is_refused() -> None:
    with pytest.raises(ValueError, match="sequence 1 has 11 tokens, a row holds 10"):
        pack_best_fit([3, 11], capacity=10)
