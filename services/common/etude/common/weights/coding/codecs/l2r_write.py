"""L2r: a tile's changes, class by class, as one rANS stream.

Symbols, in the order of decoding (`chances.py` has every number, `rans.py` the coder). For each
class c from 0 to 23, with n_c elements, of which K_c changed:

1. K_c, unless it follows from the number of changes that remain and the sizes of the later
   classes: Rice code, parameter rice_bits(mean), of z = 2 (K_c - mean) if K_c >= mean, else
   2 (mean - K_c) - 1, where mean = expected(), clipped to what is possible. The quotient q is q
   ones and a zero, even chances; 24 ones stand for z in 19 even bits.
2. For each change, with `left` of `size` elements from here to change: the gap g to it in
   elements of the class. A one, with pass_chance(), passes over 2^b elements, b = run_bits(); a
   zero says that the change is within them, and b even bits say where. Where left < 8, chance
   and b follow the shrinking size after each one, else only from change to change.
3. Its distance |d| (d mod 2^w as a signed word): the width of |d|, less 1, in ones and a zero,
   adaptive by level_of(K_c, n_c) and step, without the zero at w - 1; then, where |d| > 1,
   the bit below the top one, adaptive by width, and the other bits, even.
4. Its sign (one = negative), even; the signs of the last 16 changes of the tile are the coder's
   tail instead, the last one in bit 0.
"""

import numpy as np

from etude.common.weights.coding.codecs.chances import (
    LEVELS,
    expected,
    first_prior,
    initial,
    learn,
    level_of,
    pass_chance,
    rice_bits,
    run_bits,
    width_of,
)
from etude.common.weights.coding.codecs.classes import CLASSES, ByClass, Counts, Gaps
from etude.common.weights.coding.codecs.rans import (
    CERTAIN,
    TAIL_BITS,
    Chances,
    Symbols,
    adapted,
    chance_of,
    put_bit,
    put_even,
    write,
)
from etude.common.weights.tensors.jit import compiled, readonly

EVEN = CERTAIN // 2
LONGEST = 24
"""Ones of a quotient that announce an escape."""

ESCAPE_BITS = 19

FEW = 8
"""Changes to go below which chances follow each passed run: they change fast."""


def encode(sizes: Counts, changes: ByClass, *, word_bits: int) -> bytes:
    """The stream of a tile's changes.  [24], k changes."""
    count = changes.deltas.size
    wide = int(np.frexp(np.abs(changes.deltas).astype(np.float64))[1].sum(dtype=np.int64))
    # Steps pass over elements, or belong to a change: 2 pieces of a gap, the width, 4 more.
    most = int(sizes.sum()) + 7 * count + wide + CLASSES * (LONGEST + 3)
    symbols = np.empty(most, np.int64)
    used = _symbols(readonly(sizes), changes.fixed(), word_bits, initial(), symbols)
    out = np.empty(used + 2, np.uint16)
    start = write(symbols, used, _tail(changes.deltas), out)
    return out[start:].astype("<u2").tobytes()


def _tail(deltas: Counts) -> int:
    """The last signs, the last one in bit 0."""
    tail = 0
    for delta in deltas[-TAIL_BITS:]:
        tail = tail << 1 | int(delta < 0)
    return tail


@compiled
def _put_count(symbols: Symbols, used: int, z: int, k: int) -> int:
    quotient = min(z >> k, LONGEST)
    for _ in range(quotient):
        used = put_bit(symbols, used, 1, EVEN)
    if quotient == LONGEST:
        return put_even(symbols, used, z, ESCAPE_BITS)
    used = put_bit(symbols, used, 0, EVEN)
    return put_even(symbols, used, z, k)


@compiled
def _put_gap(symbols: Symbols, used: int, gap: int, left: int, size: int, b: int) -> int:
    chance = pass_chance(left, size, b)
    while gap >> b:
        used = put_bit(symbols, used, 1, chance)
        gap -= 1 << b
        if left < FEW:
            size -= 1 << b
            b = run_bits(left, size, b)
            chance = pass_chance(left, size, b)
    used = put_bit(symbols, used, 0, chance)
    return put_even(symbols, used, gap, b)


@compiled
def _put_distance(
    symbols: Symbols, used: int, distance: int, last: int, wider: Chances, upper: Chances
) -> int:
    bits = width_of(distance) - 1
    for step in range(min(bits + 1, last)):
        more = 1 if step < bits else 0
        used = put_bit(symbols, used, more, chance_of(wider[step]))
        wider[step] = adapted(wider[step], more)
    if bits > 0:
        bit = (distance >> (bits - 1)) & 1
        used = put_bit(symbols, used, bit, chance_of(upper[bits]))
        upper[bits] = adapted(upper[bits], bit)
        used = put_even(symbols, used, distance, bits - 1)
    return used


@compiled
def _put_class(
    symbols: Symbols,
    used: int,
    size: int,
    part: tuple[Gaps, Counts],
    signs: int,
    contexts: tuple[int, Chances, Chances],
) -> int:
    """The changes of one class, the first `signs` of them with their signs."""
    gaps, deltas = part
    last, wider, upper = contexts
    b = 0
    for j in range(gaps.size):
        gap = int(np.int64(gaps[j]))
        b = run_bits(gaps.size - j, size, b)
        used = _put_gap(symbols, used, gap, gaps.size - j, size, b)
        size -= gap + 1
        used = _put_distance(symbols, used, abs(int(deltas[j])), last, wider, upper)
        if j < signs:
            used = put_even(symbols, used, 1 if deltas[j] < 0 else 0, 1)
    return used


@compiled
def _symbols(
    sizes: Counts, changes: ByClass, word_bits: int, chances: Chances, symbols: Symbols
) -> int:
    """All symbols of a tile; how many."""
    starts, gaps, deltas = changes
    used = 0
    prior = first_prior()
    remaining = gaps.size
    later = int(sizes.sum())
    for c in range(CLASSES):
        size, start, stop = int(sizes[c]), int(starts[c]), int(starts[c + 1])
        count = stop - start
        later -= size
        low, high = max(0, remaining - later), min(size, remaining)
        if low < high:
            mean = min(max(expected(prior, size), low), high)
            z = 2 * (count - mean) if count >= mean else 2 * (mean - count) - 1
            used = _put_count(symbols, used, z, rice_bits(mean))
        learn(prior, count, size)
        remaining -= count
        if count > 0:
            contexts = (word_bits - 1, chances[level_of(count, size)], chances[LEVELS])
            part = (gaps[start:stop], deltas[start:stop])
            signs = gaps.size - TAIL_BITS - start
            used = _put_class(symbols, used, size, part, signs, contexts)
    return used
