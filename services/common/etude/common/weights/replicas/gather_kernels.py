"""One compiled pass over a block: where its elements lie, what they are and become, the digest."""

from typing import NamedTuple

import numpy as np

from etude.common.weights.replicas import region_kernels
from etude.common.weights.replicas.region_kernels import Integers, RegionWindow, TileRows, TileSpan
from etude.common.weights.tensors import ulp
from etude.common.weights.tensors.intrinsics import AHEAD, prefetch
from etude.common.weights.tensors.jit import compiled
from etude.common.weights.tensors.words import Indices, Words

ULP, XOR, NEW = 0, 1, 2
"""What the data of a block are: distances on the axis, old XOR new, or new words."""
NOT_INCREASING = -1


class CodedElements(NamedTuple):
    """Coded elements of a block."""

    places: Indices
    """Of the elements, in the block. [n]"""
    data: Words
    """[n]"""
    kind: int
    """ULP, XOR or NEW."""
    top: np.uint64
    """Top bit of the words, or 0 where the axis is that of plain integers."""


class ChangedElements(NamedTuple):
    """The elements of one block in one region; all of one length."""

    at: Indices
    """Words of the parameter, counted from a base."""
    old: Words
    new: Words


class GatherResult(NamedTuple):
    """Counts and digest of the elements that were gathered."""

    held: int
    """Elements that the region holds, or NOT_INCREASING."""
    changed: int
    """Of them, those that count and change."""
    a: np.uint64
    """With b, what they add to the state digest."""
    b: np.uint64


@compiled
def gather(  # noqa: PLR0913, PLR0917 - a block, where it lies, a region, live words, what to fill
    coded: CodedElements,
    span: TileSpan,
    grain: TileRows,
    window: RegionWindow,
    others: Integers,
    words: Words,
    base: int,
    found: ChangedElements,
) -> GatherResult:
    """Fill what is found with what a block changes in a region."""
    index, data, kind, top = coded
    flats = np.empty(index.size, np.int64)
    picks = flats
    if is_one_run(span, grain, window):
        count = fill_positions(index, span, grain.base, flats)
    else:
        picks = np.empty(index.size, np.int64)
        count = region_kernels.place_elements(index, span, grain, window, flats, picks)
    if count < 0:
        return GatherResult(NOT_INCREASING, 0, np.uint64(0), np.uint64(0))
    flats = flats[:count]
    at, old, new = found.at[:count], found.old[:count], found.new[:count]
    region_kernels.positions(flats, window, base, at)
    fetch_words(words, base, at, old)
    if count == index.size:
        compute_new_words(old, data, kind, top, new)
    else:
        compute_new_words(old, data[picks[:count]], kind, top, new)
    changed, a, b = region_kernels.count_changes(old, new, flats, span, others)
    return GatherResult(count, changed, a, b)


@compiled
def is_one_run(span: TileSpan, grain: TileRows, window: RegionWindow) -> bool:
    """Return true if a block is one range of the tensor, whole in a window of one row."""
    start = grain.base - window.source_offset
    return (
        window.rows == 1
        and span.hi <= grain.columns
        and start + span.lo >= 0
        and start + span.hi <= window.width
    )


@compiled
def fill_positions(index: Indices, span: TileSpan, base: int, flats: Integers) -> int:
    """Fill positions in the tensor; how many, or NOT_INCREASING."""
    start = base + span.lo
    is_good = index.size == 0 or np.int64(index[index.size - 1]) < span.hi - span.lo
    for i in range(index.size):
        flats[i] = np.int64(index[i]) + start
    for i in range(1, index.size):
        is_good &= index[i] > index[i - 1]
    return index.size if is_good else NOT_INCREASING


@compiled
def fetch_words(words: Words, base: int, at: Indices, out: Words) -> None:
    """The words at some positions.  [n], [k] -> [k]."""
    near = max(0, at.size - AHEAD)
    for i in range(near):
        prefetch(words, np.uint64(np.int64(at[i + AHEAD]) + base))
        out[i] = words[np.uint64(np.int64(at[i]) + base)]
    for i in range(near, at.size):
        out[i] = words[np.uint64(np.int64(at[i]) + base)]


@compiled
def compute_new_words(old: Words, data: Words, kind: int, top: np.uint64, new: Words) -> None:
    """The words after a change.  [k], [k] -> [k]."""
    if kind == ULP:
        for i in range(old.size):
            new[i] = ulp.step(np.uint64(old[i]), np.uint64(data[i]), top)
    elif kind == XOR:
        for i in range(old.size):
            new[i] = old[i] ^ data[i]
    else:
        new[:] = data
