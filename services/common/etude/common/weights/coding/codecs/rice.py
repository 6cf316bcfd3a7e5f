"""Rice codes of gaps and differences, one bit stream per class.

Rice_k(v): q = v >> k ones and a zero, then the k low bits of v; or, where q >= 24, 24 ones and v in
32 bits. Bits fill bytes from the lowest one. A stream holds, for each change of its class in order,
Rice_k(gap), the sign (1 = negative), Rice_a(|d| - 1), and zeros to the end of its last byte.

k (0 to 16) and a (0 to 14) are those that make the stream shortest, the smaller one of equals.
"""

import numpy as np
import numpy.typing as npt

from etude.common.weights.coding.codecs.classes import Counts, Gaps
from etude.common.weights.tensors.jit import compiled

Octets = npt.NDArray[np.uint8]

MOST_K = 16
MOST_A = 14
_LONGEST = 24
_RAW_BITS = 32

FAULTS = {
    1: "ends before the last change",
    2: "left-over bits",
    3: "an escape of a number that needs none",
    4: "a number out of range",
}


@compiled
def rice_cost(gaps: Gaps, k: int) -> int:
    """Bits of all gaps under one parameter."""
    bits = 0
    for gap in gaps:
        quotient = int(np.int64(gap)) >> k
        bits += quotient + 1 + k if quotient < _LONGEST else _LONGEST + _RAW_BITS
    return bits


@compiled
def distance_cost(deltas: Counts, a: int) -> int:
    """Bits of all distances under one parameter, without the signs."""
    bits = 0
    for delta in deltas:
        quotient = (abs(int(delta)) - 1) >> a
        bits += quotient + 1 + a if quotient < _LONGEST else _LONGEST + _RAW_BITS
    return bits


@compiled
def best(gaps: Gaps, deltas: Counts) -> tuple[int, int, int]:
    """The parameters of a class with changes: k, a, and the bits of its stream."""
    k, gap_bits = 0, rice_cost(gaps, 0)
    other = 1
    # No code is shorter than its parameter and one more.
    while other <= MOST_K and gaps.size * (other + 1) < gap_bits:
        bits = rice_cost(gaps, other)
        if bits < gap_bits:
            k, gap_bits = other, bits
        other += 1
    a, distance_bits = 0, distance_cost(deltas, 0)
    other = 1
    while other <= MOST_A and deltas.size * (other + 1) < distance_bits:
        bits = distance_cost(deltas, other)
        if bits < distance_bits:
            a, distance_bits = other, bits
        other += 1
    return k, a, gap_bits + distance_bits + deltas.size


@compiled
def _put_bits(out: Octets, at: int, value: int, bits: int) -> int:
    """Write the low bits of a value at a bit of zeroed bytes; the bit after them."""
    while bits > 0:
        shift = at & 7
        out[at >> 3] |= (value << shift) & 0xFF
        step = min(8 - shift, bits)
        value >>= step
        at += step
        bits -= step
    return at


@compiled
def _put_rice(out: Octets, at: int, value: int, k: int) -> int:
    quotient = value >> k
    if quotient >= _LONGEST:
        at = _put_bits(out, at, (1 << _LONGEST) - 1, _LONGEST)
        return _put_bits(out, at, value, _RAW_BITS)
    at = _put_bits(out, at, (1 << quotient) - 1, quotient + 1)
    return _put_bits(out, at, value & ((1 << k) - 1), k)


@compiled
def write_class(gaps: Gaps, deltas: Counts, k: int, a: int, out: Octets) -> int:
    """Write one class into zeroed bytes; its bits."""
    at = 0
    for j in range(gaps.size):
        at = _put_rice(out, at, int(np.int64(gaps[j])), k)
        at = _put_bits(out, at, 1 if deltas[j] < 0 else 0, 1)
        at = _put_rice(out, at, abs(int(deltas[j])) - 1, a)
    return at


@compiled
def _refilled(stream: Octets, ready: np.uint64, held: int, at: int) -> tuple[np.uint64, int, int]:
    """At least 57 bits at hand; beyond the end they are zeros, and `at` tells."""
    while held <= 56:
        if at < stream.size:
            ready |= np.uint64(stream[at]) << np.uint64(held)
        at += 1
        held += 8
    return ready, held, at


@compiled
def _take_rice(ready: np.uint64, held: int, k: int) -> tuple[np.uint64, int, np.int64]:
    """One code of 57 bits at most; a negative value is an escape of what needs none."""
    one = np.uint64(1)
    quotient = 0
    while ready & one and quotient < _LONGEST:
        ready >>= one
        quotient += 1
    if quotient == _LONGEST:
        value = np.int64(ready & np.uint64(0xFFFFFFFF))
        ready >>= np.uint64(_RAW_BITS)
        return ready, held - _LONGEST - _RAW_BITS, value if value >> k >= _LONGEST else np.int64(-1)
    ready >>= one
    low = np.int64(ready & ((one << np.uint64(k)) - one))
    return ready >> np.uint64(k), held - quotient - 1 - k, (np.int64(quotient) << k) + low


@compiled
def read_class(stream: Octets, k: int, a: int, gaps: Gaps, deltas: Counts, furthest: int) -> int:
    """Fill the changes of one class, whose distances are `furthest` at most.

    Returns:
        0, or one of FAULTS.
    """
    ready, held, at = np.uint64(0), 0, 0
    for j in range(gaps.size):
        ready, held, at = _refilled(stream, ready, held, at)
        ready, held, gap = _take_rice(ready, held, k)
        ready, held, at = _refilled(stream, ready, held, at)
        negative = ready & np.uint64(1)
        ready, held, distance = _take_rice(ready >> np.uint64(1), held - 1, a)
        if gap < 0 or distance < 0:
            return 3
        distance += 1
        # The one difference of the largest size is negative: it is its own opposite.
        if gap >= 0xFFFFFFFF or distance > furthest or (distance == furthest and not negative):
            return 4
        gaps[j] = gap
        deltas[j] = -distance if negative else distance
        if 8 * at - held > 8 * stream.size:
            return 1
    if (8 * at - held + 7) >> 3 != stream.size:
        return 2
    return 2 if ready != 0 else 0
