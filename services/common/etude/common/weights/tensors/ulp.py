"""The ulp axis: changes of words as differences between neighbours.

`key(u) = u ^ top if u < top else ~u` with `top = 2^(w-1)` orders sign-magnitude formats by value
and is a bijection on all bit patterns, so that -0, infinities and NaN payloads survive. Formats
without an order use the words themselves.
"""

import numpy as np
import numpy.typing as npt

from etude.common.weights.tensors.jit import compiled, readonly
from etude.common.weights.tensors.words import Words


def delta(old: Words, new: Words, *, ordered: bool) -> Words:
    """Distance that each word moved: (key(new) - key(old)) mod 2^w.  [k], [k] -> [k]."""
    out = np.empty_like(new)
    _delta(readonly(old), readonly(new), _top(old, ordered=ordered), out)
    return out


def add_ulps(old: Words, delta: Words, *, ordered: bool) -> Words:
    """The words that were moved by delta(): its inverse.  [k], [k] -> [k]."""
    out = np.empty_like(old)
    _add_ulps(readonly(old), readonly(delta), _top(old, ordered=ordered), out)
    return out


def top_bit(word: npt.DTypeLike, *, ordered: bool) -> np.uint64:
    """The sign bit of ordered words; 0, which stands for the plain axis, of others."""
    return np.uint64(1 << (np.dtype(word).itemsize * 8 - 1) if ordered else 0)


def _top(words: Words, *, ordered: bool) -> np.uint64:
    return top_bit(words.dtype, ordered=ordered)


@compiled
def key(word: np.uint64, top: np.uint64) -> np.uint64:
    """Place of a word on its axis, in the low w bits."""
    if top == np.uint64(0):
        return word
    return word ^ top if word < top else ~word


@compiled
def bits(place: np.uint64, top: np.uint64) -> np.uint64:
    """The word at a place whose bits above w are clear, in the low w bits: inverse of key()."""
    if top == np.uint64(0):
        return place
    return place ^ top if place >= top else ~place


@compiled
def _delta(old: Words, new: Words, top: np.uint64, out: Words) -> None:
    for i in range(old.size):
        out[i] = key(np.uint64(new[i]), top) - key(np.uint64(old[i]), top)


@compiled
def step(word: np.uint64, by: np.uint64, top: np.uint64) -> np.uint64:
    """The word `by` places further on its axis, in the low w bits."""
    if top == np.uint64(0):
        return word + by
    # The axis is as long as the words are wide: it wraps at 2^w.
    mask = top | (top - np.uint64(1))
    return bits((key(word, top) + by) & mask, top)


@compiled
def _add_ulps(old: Words, by: Words, top: np.uint64, out: Words) -> None:
    for i in range(old.size):
        out[i] = step(np.uint64(old[i]), np.uint64(by[i]), top)
