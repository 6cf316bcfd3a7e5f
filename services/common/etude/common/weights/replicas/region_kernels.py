"""Compiled loops between the elements of a tile and the words of a rank's parameters."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from etude.common.weights.tensors import digest
from etude.common.weights.tensors.intrinsics import AHEAD, prefetch
from etude.common.weights.tensors.jit import compiled
from etude.common.weights.tensors.tiles import Tiling
from etude.common.weights.tensors.words import Indices, Words

Integers = npt.NDArray[np.int64]


class TileRows(NamedTuple):
    """Rows of a tile within its tensor: element `local` is in row local // columns."""

    base: int
    """Flat position of its first element."""
    columns: int
    stride: int
    """Flat distance of its rows."""


class RegionWindow(NamedTuple):
    """A region without the name of its parameter."""

    parameter_offset: int
    source_offset: int
    rows: int
    width: int
    parameter_stride: int
    source_stride: int


class TileSpan(NamedTuple):
    """A range of a tile, and where its tensor starts in the state digest."""

    lo: int
    hi: int
    first_lane: int


def tile_rows(tiling: Tiling, number: int) -> TileRows:
    """Rows of a tile; one long row if it is a range of the tensor."""
    tile = tiling.tile(number)
    base = (tile.plane * tiling.rows + tile.row) * tiling.columns + tile.column
    if tiling.is_contiguous():
        return TileRows(base, tile.elements, tile.elements)
    return TileRows(base, tile.columns, tiling.columns)


@compiled
def is_in(flat: int, window: npt.NDArray[np.int64]) -> bool:
    """Return true if a region given by its numbers() holds an element."""
    place = flat - window[1]
    if place < 0:
        return False
    row = place // window[5]
    return bool(row < window[2] and place - row * window[5] < window[3])


@compiled
def is_counted(flat: int, others: npt.NDArray[np.int64]) -> bool:
    """Return true if no region that counts before this one holds an element.  [r, 6]."""
    for i in range(others.shape[0]):  # noqa: SIM110 - numba compiles no generators
        if is_in(flat, others[i]):
            return False
    return True


@compiled
def place_elements(
    index: Indices,
    span: TileSpan,
    grain: TileRows,
    window: RegionWindow,
    flats: Integers,
    picks: Integers,
) -> int:
    """Fill the places of a block that lie in a window.

    Fills flats with their positions in the tensor, picks with their places in index; returns how
    many, or -1 if the places are not increasing inside the block. Divisions happen once per row,
    not once per element.
    """
    count = 0
    row_start = row_stop = row_flat = window_start = np.int64(0)
    window_stop = previous = np.int64(-1)
    for i in range(index.size):
        here = np.int64(index[i])
        local = here + span.lo
        if here <= previous or local >= span.hi:
            return -1
        previous = here
        if local >= row_stop:
            row = local // grain.columns
            row_start = row * grain.columns
            row_stop = row_start + grain.columns
            row_flat = grain.base + row * grain.stride
        flat = row_flat + local - row_start
        at = flat - window.source_offset
        if at < 0:
            continue
        if at >= window_stop:
            row = at // window.source_stride
            if row >= window.rows:
                # Later places lie further still, but must be checked to increase.
                continue
            window_start = row * window.source_stride
            window_stop = window_start + window.source_stride
        if at - window_start < window.width:
            flats[count] = flat
            picks[count] = i
            count += 1
    return count


@compiled
def positions(flats: Integers, window: RegionWindow, base: int, out: Indices) -> None:
    """Words of the parameter, counted from base, that hold elements of the window.  [k] -> [k]."""
    start = np.int64(0)
    stop = np.int64(-1)
    row = np.int64(0)
    for i in range(flats.size):
        at = flats[i] - window.source_offset
        if at >= stop:
            row = at // window.source_stride
            start = row * window.source_stride
            stop = start + window.source_stride
        out[i] = window.parameter_offset + row * window.parameter_stride + at - start - base


@compiled
def fetch_tile(
    words: Words, grain: TileRows, window: RegionWindow, old: Words, seen: npt.NDArray[np.bool_]
) -> None:
    """The words of a whole tile as far as a window holds them, and which it held.  [n], [n]."""
    for row in range(old.size // grain.columns):
        # Counted from the window's first element; each turn of the loop copies one run.
        start = grain.base + row * grain.stride - window.source_offset
        stop = start + grain.columns
        at = max(0, start)
        while at < stop:
            line = at // window.source_stride
            column = at - line * window.source_stride
            if line >= window.rows:
                break
            run = min(window.width - column, stop - at)
            if run <= 0:
                at += window.source_stride - column
                continue
            source = window.parameter_offset + line * window.parameter_stride + column
            target = row * grain.columns + at - start
            old[target : target + run] = words[source : source + run]
            seen[target : target + run] = True
            at += run


@compiled
def count_changes(
    old: Words, new: Words, flats: Integers, span: TileSpan, others: npt.NDArray[np.int64]
) -> tuple[int, np.uint64, np.uint64]:
    """Number of counted elements that change, and their contribution to the state digest."""
    count = 0
    if others.shape[0] == 0:
        for i in range(old.size):
            count += old[i] != new[i]
        # Words that stay as they are add nothing.
        a, b = digest.change_words(old, new, flats, np.uint64(span.first_lane))
        return count, a, b
    a = np.uint64(0)
    b = np.uint64(0)
    lanes = max(1, old.itemsize // 2)
    for i in range(old.size):
        if old[i] == new[i] or not is_counted(flats[i], others):
            continue
        lane = np.uint64(span.first_lane) + np.uint64(flats[i] * lanes)
        more_a, more_b = digest.element(np.uint64(new[i]), lane, lanes)
        less_a, less_b = digest.element(np.uint64(old[i]), lane, lanes)
        a += more_a - less_a
        b += more_b - less_b
        count += 1
    return count, a, b


@compiled
def overwrite(words: Words, base: int, at: Indices, old: Words, new: Words) -> int:
    """Write new words; how many that were overwritten were neither old nor new already."""
    strange = 0
    part = words[base:]
    seen = np.empty(AHEAD, words.dtype)
    for start in range(0, at.size, AHEAD):
        stop = min(start + AHEAD, at.size)
        for i in range(stop, min(stop + AHEAD, at.size)):
            prefetch(part, np.uint64(at[i]))
        places, before, after = at[start:stop], old[start:stop], new[start:stop]
        for i in range(places.size):
            place = np.uint64(places[i])
            seen[i] = part[place]
            part[place] = after[i]
        for i in range(places.size):
            strange += (seen[i] != before[i]) & (seen[i] != after[i])
    return strange


@compiled
def scan(
    words: Words, window: RegionWindow, first_lane: int, others: npt.NDArray[np.int64]
) -> tuple[np.uint64, np.uint64]:
    """The state digest of the counted elements of a window."""
    a = np.uint64(0)
    b = np.uint64(0)
    lanes = max(1, words.itemsize // 2)
    for row in range(window.rows):
        start = window.parameter_offset + row * window.parameter_stride
        flat = window.source_offset + row * window.source_stride
        if others.shape[0] == 0:
            lane = np.uint64(first_lane) + np.uint64(flat * lanes)
            more_a, more_b = digest.scan_words(words[start : start + window.width], lane)
            a += more_a
            b += more_b
            continue
        for column in range(window.width):
            if is_counted(flat + column, others):
                lane = np.uint64(first_lane) + np.uint64((flat + column) * lanes)
                more_a, more_b = digest.element(np.uint64(words[start + column]), lane, lanes)
                a += more_a
                b += more_b
    return a, b
