"""L2r: a tile's changes from its rANS stream; `l2r_write.py` has the format."""

import numpy as np

from etude.common.errors import CorruptError
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
)
from etude.common.weights.coding.codecs.classes import CLASSES, ByClass, Counts, Gaps
from etude.common.weights.coding.codecs.l2r_write import ESCAPE_BITS, EVEN, FEW, LONGEST
from etude.common.weights.coding.codecs.rans import (
    TAIL_BITS,
    Chances,
    Stream,
    adapted,
    chance_of,
    take_bit,
    take_even,
)
from etude.common.weights.tensors.jit import compiled, readonly

_FAULTS = {
    1: "stream: more or fewer changes in a class than there can be",
    2: "stream: a place beyond its class",
    3: "stream: ends before the last change",
    4: "stream: left-over words",
    5: "stream: does not end in its first state",
    6: "stream: a difference beyond the words",
}


def decode(
    data: memoryview, sizes: Counts, changes: ByClass, *, word_bits: int, where: str
) -> None:
    """Fill the changes, whose number is the length of their arrays.  [24], k changes.

    Raises:
        CorruptError: not what encode() writes for these classes and changes.
    """
    if len(data) % 2 or len(data) < 4:
        raise CorruptError(f"{where}: {len(data)} bytes are no L2r block")
    stream = np.frombuffer(data, "<u2").astype(np.uint16)
    if stream[0] == 0:
        raise CorruptError(f"{where}: stream: starts below the coder's states")
    fault = _changes(readonly(stream), readonly(sizes), changes, word_bits, initial())
    if fault:
        raise CorruptError(f"{where}: {_FAULTS[fault]}")


@compiled
def _take_count(x: int, place: int, stream: Stream, k: int) -> tuple[int, int, int]:
    """State, place, and z, which is negative if it should not have been escaped."""
    quotient = 0
    bit = 1
    while bit and quotient < LONGEST:
        x, place, bit = take_bit(x, place, stream, EVEN)
        quotient += bit
    if quotient == LONGEST:
        x, place, z = take_even(x, place, stream, ESCAPE_BITS)
        return x, place, z if z >> k >= LONGEST else -1
    x, place, low = take_even(x, place, stream, k)
    return x, place, (quotient << k) + low


@compiled
def _take_gap(
    x: int, place: int, stream: Stream, left: int, size: int, b: int
) -> tuple[int, int, int]:
    """State, place, and the gap, which is above size - left if it is none."""
    chance = pass_chance(left, size, b)
    gap = 0
    x, place, bit = take_bit(x, place, stream, chance)
    while bit:
        gap += 1 << b
        if gap > size - left:
            return x, place, gap
        if left < FEW:
            b = run_bits(left, size - gap, b)
            chance = pass_chance(left, size - gap, b)
        x, place, bit = take_bit(x, place, stream, chance)
    x, place, low = take_even(x, place, stream, b)
    return x, place, gap + low


@compiled
def _take_distance(
    x: int, place: int, stream: Stream, last: int, wider: Chances, upper: Chances
) -> tuple[int, int, int]:
    bits = 0
    bit = 1
    while bit and bits < last:
        x, place, bit = take_bit(x, place, stream, chance_of(wider[bits]))
        wider[bits] = adapted(wider[bits], bit)
        bits += bit
    if bits == 0:
        return x, place, 1
    x, place, bit = take_bit(x, place, stream, chance_of(upper[bits]))
    upper[bits] = adapted(upper[bits], bit)
    x, place, low = take_even(x, place, stream, bits - 1)
    return x, place, (2 + bit << (bits - 1)) + low


@compiled
def _take_class(
    state: tuple[int, int],
    stream: Stream,
    size: int,
    part: tuple[Gaps, Counts],
    signs: int,
    contexts: tuple[int, Chances, Chances],
) -> tuple[int, int, int]:
    """Fill the changes of one class, of which the first `signs` have their signs here.

    Returns:
        State, place, and 0 or one of _FAULTS.
    """
    x, place = state
    gaps, deltas = part
    last, wider, upper = contexts
    b = 0
    for j in range(gaps.size):
        left = gaps.size - j
        b = run_bits(left, size, b)
        x, place, gap = _take_gap(x, place, stream, left, size, b)
        if gap > size - left:
            return x, place, 2
        gaps[j] = gap
        size -= gap + 1
        x, place, distance = _take_distance(x, place, stream, last, wider, upper)
        if j < signs:
            x, place, bit = take_even(x, place, stream, 1)
            distance = -distance if bit else distance
        deltas[j] = distance
        if place > stream.size:
            return x, place, 3
    return x, place, 0


@compiled
def _take_tail(state: tuple[int, int], stream: Stream, deltas: Counts, last: int) -> int:
    """The signs of the last changes from the coder's last state; 0, or one of _FAULTS."""
    x, place = state
    if place != stream.size:
        return 3 if place > stream.size else 4
    tail = x - 65536
    for j in range(min(TAIL_BITS, deltas.size)):
        if tail & 1:
            deltas[deltas.size - 1 - j] *= -1
        tail >>= 1
    if tail != 0:
        return 5
    furthest = np.int64(1) << last
    for delta in deltas:
        # The one difference of the largest size is negative: it is its own opposite.
        if not -furthest <= delta < furthest:
            return 6
    return 0


@compiled
def _changes(
    stream: Stream, sizes: Counts, changes: ByClass, word_bits: int, chances: Chances
) -> int:
    """Fill all changes of a tile; 0, or one of _FAULTS."""
    starts, gaps, deltas = changes
    x, place = int(np.int64(stream[0])) << 16 | int(np.int64(stream[1])), 2
    prior = first_prior()
    remaining = gaps.size
    later = int(sizes.sum())
    start = 0
    for c in range(CLASSES):
        size = int(sizes[c])
        later -= size
        low, high = max(0, remaining - later), min(size, remaining)
        count = low
        if low < high:
            mean = min(max(expected(prior, size), low), high)
            x, place, z = _take_count(x, place, stream, rice_bits(mean))
            count = mean - ((z + 1) >> 1) if z & 1 else mean + (z >> 1)
            if z < 0 or count < low or count > high:
                return 1
        learn(prior, count, size)
        remaining -= count
        stop = start + count
        if count > 0:
            contexts = (word_bits - 1, chances[level_of(count, size)], chances[LEVELS])
            part = (gaps[start:stop], deltas[start:stop])
            signs = gaps.size - TAIL_BITS - start
            x, place, fault = _take_class((x, place), stream, size, part, signs, contexts)
            if fault:
                return fault
        start = stop
        starts[c + 1] = stop
    return _take_tail((x, place), stream, deltas, word_bits - 1)
