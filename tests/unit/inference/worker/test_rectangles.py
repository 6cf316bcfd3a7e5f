"""Rectangles say of every element where it came from, in few words."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from etude.inference.worker.rectangles import MapRectangle, rectangles

SOURCES = [-2, -1, *range(39), *range(40, 99)]
"""Numbers of two tensors, with the gap between them, and what is none."""
STARTS = np.array([0, 40, 100], np.int64)


def spread(found: list[MapRectangle], size: int) -> list[int]:
    """Source of each element, by plain loops; -1 where there is none."""
    sources = [-1] * size
    for each in found:
        for row in range(each.rows):
            for column in range(each.width):
                at = each.parameter_offset + row * each.parameter_stride + column
                assert sources[at] == -1
                sources[at] = each.source_offset + row * each.source_stride + column
    return sources


@given(arrays.arrays(np.int64, st.integers(0, 60), elements=st.sampled_from(SOURCES)))
def test_any_placement_is_kept(numbers: np.ndarray) -> None:
    found = rectangles(numbers, STARTS)
    assert spread(found, len(numbers)) == [max(-1, n) for n in numbers.tolist()]
    for each in found:
        last = each.source_offset + (each.rows - 1) * each.source_stride + each.width - 1
        assert min(each.parameter_stride, each.source_stride) >= each.width, "its rows overlap"
        assert (each.source_offset < 40) == (last < 40), "it crosses into another tensor"


def test_a_whole_tensor_is_one_rectangle() -> None:
    assert rectangles(np.arange(40, 99), STARTS) == [MapRectangle(0, 40, 1, 59, 59, 59)]


def test_a_cut_along_columns_is_one_rectangle() -> None:
    grid = np.arange(40).reshape(4, 10)
    assert rectangles(grid[:, 5:].reshape(-1), STARTS) == [MapRectangle(0, 5, 4, 5, 5, 10)]


def test_padding_between_rows_is_left_out() -> None:
    grid = np.full((4, 12), -1)
    grid[:, :10] = np.arange(40).reshape(4, 10)
    assert rectangles(grid.reshape(-1), STARTS) == [MapRectangle(0, 0, 4, 10, 12, 10)]


def test_tensors_of_one_size_beside_each_other_stay_apart() -> None:
    both = np.concatenate([np.arange(10, 39), np.arange(41, 70)])
    assert len(rectangles(both, STARTS)) == 2
