"""Element numbers encoded as weights: bit patterns that a loader keeps unless it computes.

A number travels through a weight loader as digits, one digit per load, each in the raw bits of
an element: a positive, normal, finite value of the element's own format. Copies and casts to a
wider format and back keep such bits; computing with them does not.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from etude.common.weights.tensors.jit import compiled, readonly
from etude.common.weights.tensors.words import Words, word_type

Numbers = npt.NDArray[np.int64]

CONSTANT = -1
"""Result for an element that was never written, but is the same in every load."""
UNKNOWN = -2
"""Result for an element that was computed from what was written."""

BLANK_BYTE = 0x5A
"""Byte that fills parameters before the loads: no digit of any format has such bytes."""


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


def num_loads(dtypes: set[str], highest: int) -> int:
    """Number of loads that carry numbers up to the highest through all of the formats.

    The last one carries a check digit, a hash of the number: a computed element passes for a
    number with probability 2^-12 (2^-6 at 8 bits), a whole row practically never.
    """
    digits = (-(-max(1, highest.bit_length()) // _ALPHABETS[dtype].bits) for dtype in dtypes)
    return max(digits, default=1) + 1


def encode_digits(numbers: Numbers, dtype: str, load: int, loads: int) -> Words:
    """The words that carry one digit of each number."""
    out = np.empty(len(numbers), word_type(dtype))
    _write(readonly(numbers), out, _ALPHABETS[dtype], _digit_position(dtype, load, loads))
    return out


def digits(numbers: Numbers, dtype: str, load: int, loads: int) -> Numbers:
    """The digit of each number that one of the loads carries."""
    return decode_digits(encode_digits(numbers, dtype, load, loads), dtype)


def decode_digits(words: Words, dtype: str) -> Numbers:
    """The digit in each word; CONSTANT if it has none."""
    found = np.empty(len(words), np.int64)
    _digits_of(readonly(words), found, _ALPHABETS[dtype])
    return found


def digits_present(words: Words, dtype: str) -> npt.NDArray[np.bool_]:
    """Flags of the digits that occur in the words."""
    seen = np.zeros(1 << _ALPHABETS[dtype].bits, np.bool_)
    _mark_present(readonly(words), seen, _ALPHABETS[dtype])
    return seen


class DigitReader:
    """Reassembles the numbers of one parameter's elements, load by load."""

    def __init__(self, dtype: str, elements: int, loads: int) -> None:
        self._dtype = dtype
        self._loads = loads
        self._first: Words | None = None
        self._numbers = np.zeros(elements, np.int64)
        self._constant = np.ones(elements, np.bool_)
        self._sound = np.ones(elements, np.bool_)

    def read(self, words: Words, load: int) -> None:
        """Read the parameter's words after one load; loads come in order."""
        if self._first is None:
            self._first = words.copy()
        place = _digit_position(self._dtype, load, self._loads)
        self._constant &= words == self._first
        _read(readonly(words), self._numbers, self._sound, _ALPHABETS[self._dtype], place)

    def numbers(self) -> Numbers:
        """Per element its number, CONSTANT or UNKNOWN; call it once, at the end."""
        found = self._numbers
        found[~self._sound] = UNKNOWN
        found[~self._sound & self._constant] = CONSTANT
        return found


_CHECK = -1
"""Bit position that stands for the check digit."""


def _digit_position(dtype: str, load: int, loads: int) -> int:
    """Lowest bit of the digit that a load carries."""
    return _CHECK if load == loads - 1 else min(_ALPHABETS[dtype].bits * load, 63)


@compiled
def _digit(number: np.uint64, alphabet: Alphabet, place: int) -> np.uint64:
    mask = (np.uint64(1) << np.uint64(alphabet.bits)) - np.uint64(1)
    if place < 0:
        hashed = (number + np.uint64(1)) * np.uint64(0x9E37_79B9_7F4A_7C15)
        return (hashed >> np.uint64(64 - alphabet.bits)) & mask
    return (number >> np.uint64(place)) & mask


@compiled
def _write(numbers: Numbers, out: Words, alphabet: Alphabet, place: int) -> None:
    lowest = np.uint64(alphabet.lowest)
    for i in range(out.size):
        digit = _digit(np.uint64(numbers[i]), alphabet, place)
        out[i] = lowest + (digit << np.uint64(alphabet.shift))


@compiled
def _decode_word(word: np.uint64, alphabet: Alphabet) -> int:
    """The digit of a word, or CONSTANT."""
    above = word - np.uint64(alphabet.lowest)  # wraps below the lowest
    digit = above >> np.uint64(alphabet.shift)
    if digit >> np.uint64(alphabet.bits) or digit << np.uint64(alphabet.shift) != above:
        return CONSTANT
    return np.int64(digit)  # type: ignore[return-value]  # numba's integers


@compiled
def _digits_of(words: Words, found: Numbers, alphabet: Alphabet) -> None:
    for i in range(words.size):
        found[i] = _decode_word(np.uint64(words[i]), alphabet)


@compiled
def _mark_present(words: Words, seen: npt.NDArray[np.bool_], alphabet: Alphabet) -> None:
    for i in range(words.size):
        digit = _decode_word(np.uint64(words[i]), alphabet)
        if digit >= 0:
            seen[digit] = True


@compiled
def _read(
    words: Words,
    numbers: Numbers,
    sound: npt.NDArray[np.bool_],
    alphabet: Alphabet,
    place: int,
) -> None:
    for i in range(words.size):
        digit = _decode_word(np.uint64(words[i]), alphabet)
        if digit < 0:
            sound[i] = False
        elif place < 0:
            sound[i] &= np.uint64(digit) == _digit(np.uint64(numbers[i]), alphabet, place)
        elif place < 63:
            numbers[i] |= np.int64(digit) << np.int64(place)
