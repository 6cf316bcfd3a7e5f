"""Rectangles of a parameter, from the source of each of its elements."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from etude.common.weights.tensors.jit import compiled
from etude.inference.worker.element_codes import Numbers

FIELDS = 6


class MapRectangle(NamedTuple):
    """Element (r, c) lies at parameter position offset + r * stride + c, as does its source."""

    parameter_offset: int
    source_offset: int
    rows: int
    width: int
    parameter_stride: int
    source_stride: int

    @property
    def elements(self) -> int:
        """Number of elements."""
        return self.rows * self.width


def rectangles(numbers: Numbers, starts: Numbers) -> list[MapRectangle]:
    """The rectangles of a parameter whose elements come from consecutive numbers.

    Args:
        numbers: source of each element, below 0 where there is none. [n]
        starts: first number of each tensor, then one above the last; none is a source itself
            at the end of a tensor, so that no run crosses into the next. [t + 1]
    """
    return [MapRectangle(*map(int, row)) for row in _rectangles(numbers, starts)]


@compiled
def _run_length(numbers: Numbers, start: int) -> int:
    stop = start + 1
    while stop < len(numbers) and numbers[stop] == numbers[stop - 1] + 1:
        stop += 1
    return stop - start


@compiled
def _rectangles(numbers: Numbers, starts: Numbers) -> npt.NDArray[np.int64]:
    """Greedy: each run of consecutive numbers joins the rectangle before it, if it fits."""
    end = 0  # of the tensor that the last rectangle is of
    found = np.empty((16, FIELDS), np.int64)
    count = 0
    at = 0
    while at < len(numbers):
        if numbers[at] < 0:
            at += 1
            continue
        width = _run_length(numbers, at)
        source = numbers[at]
        last = found[count - 1] if count else found[0]
        fits = count > 0 and last[3] == width and last[1] + width <= source < end
        if fits and last[2] == 1:
            last[2], last[4], last[5] = 2, at - last[0], source - last[1]
        elif fits and at == last[0] + last[2] * last[4] and source == last[1] + last[2] * last[5]:
            last[2] += 1
        else:
            if count == len(found):
                grown = np.empty((2 * count, FIELDS), np.int64)
                grown[:count] = found
                found = grown
            found[count] = at, source, 1, width, width, width
            end = starts[np.searchsorted(starts, source, side="right")]
            count += 1
        at += width
    return found[:count]
