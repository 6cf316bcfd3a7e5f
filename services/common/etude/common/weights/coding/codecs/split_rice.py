"""Rice codes whose parts lie apart, so that they are read without waiting for one another.

A number v is its low `width` bits and a quotient v >> width. The low bits of all numbers follow
each other, from the lowest bit of each byte; then, in a stream of their own, each quotient as that
many zeros and a one. A quotient of MOST or more is MOST zeros and a one, and stands itself in a
list of escapes. Each stream ends with zeros to the end of its last byte.
(R. F. Rice, JPL 79-22, 1979; parts apart as in P. Elias, J. ACM 21(2), 1974.)
"""

import numpy as np
import numpy.typing as npt

from etude.common.weights.tensors.intrinsics import trailing_zeros
from etude.common.weights.tensors.jit import compiled
from etude.common.weights.tensors.words import Words

Octets = npt.NDArray[np.uint8]
Wide = npt.NDArray[np.uint64]
"""The same memory as octets, with 16 bytes of zeros behind them."""

MOST = 32

CUT_OFF, TOO_LONG, PADDING, FEWER, SMALL, LARGE = 1, 2, 3, 4, 5, 6
FAULTS = {
    CUT_OFF: "end before the last number",
    TOO_LONG: "a quotient that is too long, or has no escape",
    PADDING: "left-over bits",
    FEWER: "fewer escapes than there are",
    SMALL: "an escape of a number that needs none",
    LARGE: "a number out of range",
}


@compiled
def cost(values: Words, width: int) -> tuple[int, int]:
    """Bits of the quotients, and how many are escapes."""
    bits = np.int64(values.size)
    escapes = np.int64(0)
    shift = values.dtype.type(width)
    for i in range(values.size):
        quotient = values[i] >> shift
        is_large = quotient >= MOST
        bits += np.int64(MOST) if is_large else np.int64(quotient)
        escapes += is_large
    return int(bits), int(escapes)


@compiled
def best(values: Words, most_width: int, escape_bits: int) -> tuple[int, int, int]:
    """The shortest code, the narrower one of equals: width, bits of the quotients, escapes."""
    width = 0
    bits, escapes = cost(values, 0)
    least = bits + escapes * escape_bits
    other = 1
    # No code is shorter than its width and one more.
    while other <= most_width and values.size * (other + 1) < least:
        more, more_escapes = cost(values, other)
        total = more + more_escapes * escape_bits + values.size * other
        if total < least:
            width, bits, escapes, least = other, more, more_escapes, total
        other += 1
    return width, bits, escapes


@compiled
def write_low(values: Words, width: int, wide: Wide, at: int) -> None:
    """Write all low bits into zeros, from a bit on."""
    mask = (np.uint64(1) << np.uint64(width)) - np.uint64(1)
    for i in range(values.size):
        low = np.uint64(values[i]) & mask
        place, shift = at >> 6, at & 63
        wide[place] |= low << np.uint64(shift)
        # In two steps: a shift by all 64 bits is none.
        wide[place + 1] |= (low >> np.uint64(1)) >> np.uint64(63 - shift)
        at += width


@compiled
def write_high(values: Words, width: int, wide: Wide, at: int, escapes: Words) -> int:
    """Write all quotients into zeros, from a bit on; the bit after them."""
    count = 0
    shift = values.dtype.type(width)
    for i in range(values.size):
        quotient = values[i] >> shift
        if quotient >= MOST:
            escapes[count] = quotient
            count += 1
            at += MOST
        else:
            at += int(quotient)
        wide[at >> 6] |= np.uint64(1) << np.uint64(at & 63)
        at += 1
    return at


@compiled
def is_padded(octets: Octets, at: int) -> bool:
    """Return true if the bits from this one to the end of its byte are 0."""
    return at & 7 == 0 or octets[at >> 3] >> (at & 7) == 0


@compiled
def read_high(wide: Wide, at: int, escapes: Words, most: np.uint64, out: Words) -> tuple[int, int]:
    """Fill out with quotients of `most` at most, from a bit on.

    Returns:
        A fault, or 0; without one the bit after them, which lies before the last zeros.
    """
    # Unsigned places: others are checked for counting from the end.
    one, longest = np.uint64(1), np.uint64(MOST)
    place = np.uint64(at >> 6)
    ready = wide[place] & (~np.uint64(0) << np.uint64(at & 63))
    before = np.uint64(at) - one
    taken = 0
    fault = 0
    for i in range(out.size):
        while ready == 0:
            place += one
            if place >= wide.size:
                return CUT_OFF, 0
            ready = wide[place]
        here = (place << np.uint64(6)) + np.uint64(trailing_zeros(ready))
        ready &= ready - one
        quotient = here - before - one
        before = here
        if quotient >= longest:
            if quotient > longest or taken >= escapes.size:
                return TOO_LONG, 0
            quotient = np.uint64(escapes[taken])
            taken += 1
            fault = SMALL if quotient < longest else fault
        fault = LARGE if quotient > most else fault
        out[i] = quotient
    return FEWER if taken != escapes.size else fault, int(np.int64(before + one))


@compiled
def read_low(wide: Wide, at: int, width: int, out: Words) -> None:
    """Append low bits to quotients, from a bit on; the last must lie before the last zeros."""
    one, low_bits = np.uint64(1), np.uint64(63)
    bit, step = np.uint64(at), np.uint64(width)
    mask = (one << step) - one
    for i in range(out.size if width else 0):
        shift, place = bit & low_bits, bit >> np.uint64(6)
        low = wide[place] >> shift
        # In two steps: a shift by all 64 bits is none.
        low |= (wide[place + one] << one) << (low_bits - shift)
        out[i] = (np.uint64(out[i]) << step) | (low & mask)
        bit += step
