"""One compiled pass over a block: where its elements lie, what they are and become, the digest."""

import numpy as np

from etude.common.weights.replicas import placing
from etude.common.weights.replicas.placing import Grain, Integers, Span, Window
from etude.common.weights.tensors import ulp
from etude.common.weights.tensors.jit import compiled
from etude.common.weights.tensors.prefetching import AHEAD, prefetch
from etude.common.weights.tensors.words import Indices, Words

NOT_INCREASING = -1


@compiled
def gather(  # noqa: PLR0913, PLR0917 - a block, a region and three arrays to fill
    index: Indices,
    data: Words,
    kind: int,
    top: np.uint64,
    span: Span,
    grain: Grain,
    window: Window,
    others: Integers,
    words: Words,
    base: int,
    at: Indices,
    old: Words,
    new: Words,
) -> tuple[int, int, np.uint64, np.uint64]:
    """Fill at, old and new with what a block changes in a region.

    Returns:
        How many elements the region holds, or NOT_INCREASING; how many of them count and change;
        what that adds to the state digest.
    """
    flats = np.empty(index.size, np.int64)
    picks = flats
    if is_one_run(span, grain, window):
        count = run(index, span, grain.base, flats)
    else:
        picks = np.empty(index.size, np.int64)
        count = placing.place(index, span, grain, window, flats, picks)
    if count < 0:
        return NOT_INCREASING, 0, np.uint64(0), np.uint64(0)
    flats, at, old, new = flats[:count], at[:count], old[:count], new[:count]
    placing.positions(flats, window, base, at)
    fetch(words, base, at, old)
    if count == index.size:
        renew(old, data, kind, top, new)
    else:
        renew(old, data[picks[:count]], kind, top, new)
    changed, a, b = placing.change(old, new, flats, span, others)
    return count, changed, a, b


@compiled
def is_one_run(span: Span, grain: Grain, window: Window) -> bool:
    """Whether a block is a range of the tensor that lies whole in a window of one row."""
    start = grain.base - window.source_offset
    return (
        window.rows == 1
        and span.hi <= grain.columns
        and start + span.lo >= 0
        and start + span.hi <= window.width
    )


@compiled
def run(index: Indices, span: Span, base: int, flats: Integers) -> int:
    """Fill positions in the tensor; how many, or NOT_INCREASING."""
    start = base + span.lo
    is_good = index.size == 0 or np.int64(index[index.size - 1]) < span.hi - span.lo
    for i in range(index.size):
        flats[i] = np.int64(index[i]) + start
    for i in range(1, index.size):
        is_good &= index[i] > index[i - 1]
    return index.size if is_good else NOT_INCREASING


@compiled
def fetch(words: Words, base: int, at: Indices, out: Words) -> None:
    """The words at some positions.  [n], [k] -> [k]."""
    near = max(0, at.size - AHEAD)
    for i in range(near):
        prefetch(words, np.uint64(np.int64(at[i + AHEAD]) + base))
        out[i] = words[np.uint64(np.int64(at[i]) + base)]
    for i in range(near, at.size):
        out[i] = words[np.uint64(np.int64(at[i]) + base)]


@compiled
def renew(old: Words, data: Words, kind: int, top: np.uint64, new: Words) -> None:
    """The words after a change.  [k], [k] -> [k]."""
    if kind == placing.ULP:
        for i in range(old.size):
            new[i] = ulp.step(np.uint64(old[i]), np.uint64(data[i]), top)
    elif kind == placing.XOR:
        for i in range(old.size):
            new[i] = old[i] ^ data[i]
    else:
        new[:] = data
