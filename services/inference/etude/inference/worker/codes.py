"""Numbers written as weights: bit patterns that no loader changes unless it computes.

A number travels through a weight loader as digits, one digit per load, each in the raw bits of
an element: a positive, normal, finite value of the element's own format. Copies and casts to a
wider format and back keep such bits; whatever computes with them does not.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from etude.common.weights.words import Words, word_type

Numbers = npt.NDArray[np.int64]

CONSTANT = -1
"""Read back in place of a number: nothing that was written, but the same in every load."""
UNKNOWN = -2
"""Read back in place of a number: computed from what was written."""

BLANK_BYTE = 0x5A
"""Fills parameters before the loads: no digit of any format consists of such bytes."""


class Alphabet(NamedTuple):
    """Word lowest + (digit << shift) stands for a digit below 2^bits."""

    lowest: int
    bits: int
    shift: int = 0


_ALPHABETS = {
    "BF16": Alphabet(0x3000, 12),
    "F16": Alphabet(0x3000, 12),
    # In the middle, so that rounding to a narrower format gives no digit of that format.
    "F32": Alphabet(0x3000_0000, 12, 12),
    "F64": Alphabet(0x3000 << 48, 12, 28),
    "I16": Alphabet(0x3000, 12),
    "I32": Alphabet(0x3000, 12),
    "I64": Alphabet(0x3000, 12),
    "U8": Alphabet(0x10, 6),
    "I8": Alphabet(0x10, 6),
    # The exponent bits are neither all zero nor all one.
    "F8_E4M3": Alphabet(0x10, 6),
    "F8_E5M2": Alphabet(0x10, 6),
}


def loads_for(dtypes: set[str], highest: int) -> int:
    """How many loads carry numbers up to the highest through all of the formats.

    The last is a check digit, a hash of the number: an element that a loader computed reads back
    as a number of the model with probability 2^-12 (2^-6 at 8 bits), a whole row practically
    never.
    """
    digits = (-(-max(1, highest.bit_length()) // _ALPHABETS[dtype].bits) for dtype in dtypes)
    return max(digits, default=1) + 1


def written(numbers: Numbers, dtype: str, load: int, loads: int) -> Words:
    """The words that carry one digit of each number."""
    lowest, _, shift = _ALPHABETS[dtype]
    found = (digits(numbers, dtype, load, loads) << np.int64(shift)) + np.int64(lowest)
    return found.astype(word_type(dtype))


def digits(numbers: Numbers, dtype: str, load: int, loads: int) -> Numbers:
    """The digit of each number that one of the loads carries."""
    bits = _ALPHABETS[dtype].bits
    mask = np.uint64((1 << bits) - 1)
    unsigned = numbers.astype(np.uint64)
    if load == loads - 1:
        hashed = (unsigned + np.uint64(1)) * np.uint64(0x9E37_79B9_7F4A_7C15)
        found = hashed >> np.uint64(64 - bits)
    else:
        found = (unsigned >> np.uint64(min(bits * load, 63))) & mask
    return found.astype(np.int64)


def digits_of(words: Words, dtype: str) -> Numbers:
    """The digit in each word; CONSTANT where there is none."""
    lowest, bits, shift = _ALPHABETS[dtype]
    above = words.astype(np.uint64) - np.uint64(lowest)  # wraps below the lowest
    found = (above >> np.uint64(shift)).astype(np.int64)
    low = above & np.uint64((1 << shift) - 1)
    found[(above >= np.uint64(1 << (bits + shift))) | (low != 0)] = CONSTANT
    return found


def digits_seen(words: Words, dtype: str) -> npt.NDArray[np.bool_]:
    """Whether each digit is in any of the words."""
    found = digits_of(words, dtype)
    seen = np.zeros(1 << _ALPHABETS[dtype].bits, np.bool_)
    seen[found[found >= 0]] = True
    return seen


class Reader:
    """Puts the numbers of one parameter's elements together again, load by load."""

    def __init__(self, dtype: str, elements: int, loads: int) -> None:
        self._dtype = dtype
        self._loads = loads
        self._first: Words | None = None
        self._numbers = np.zeros(elements, np.int64)
        self._constant = np.ones(elements, np.bool_)
        self._sound = np.ones(elements, np.bool_)

    def read(self, words: Words, load: int) -> None:
        """Take the parameter's words after one load; loads come in order."""
        if self._first is None:
            self._first = words.copy()
        read = digits_of(words, self._dtype)
        shift = _ALPHABETS[self._dtype].bits * load
        self._constant &= words == self._first
        self._sound &= read >= 0
        if load == self._loads - 1:
            self._sound &= read == digits(self._numbers, self._dtype, load, self._loads)
        elif shift < 63:
            self._numbers |= np.maximum(read, 0) << np.int64(shift)

    def numbers(self) -> Numbers:
        """Per element its number, CONSTANT or UNKNOWN."""
        found = np.where(self._sound, self._numbers, UNKNOWN)
        found[~self._sound & self._constant] = CONSTANT
        return found
