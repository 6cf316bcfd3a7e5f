"""Classes of elements by old exponent: how likely an element is to change follows from it.

An update of one size moves a small weight, whose neighbours are close, over more of them than a
large one. Class of a word = clamp(e - e0, 0, 23): e is its exponent (FIELDS), and e0 = max(0,
median - 14), where the median is the smallest e with at least half of the tile's elements at or
below it. Formats without an order have the one exponent 0.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from etude.common.weights.tensors.jit import compiled, readonly
from etude.common.weights.tensors.words import Indices, Words

CLASSES = 24
BELOW_MEDIAN = 14
"""Exponents below the tile's median that have classes of their own."""

Counts = npt.NDArray[np.int64]
Gaps = npt.NDArray[np.uint32]
Members = npt.NDArray[np.uint8]
"""Class of each element. [n]"""


class Field(NamedTuple):
    """The exponent of a word: (word >> shift) & mask."""

    shift: int
    mask: int


FIELDS = {
    "BF16": Field(7, 0xFF),
    "F16": Field(10, 0x1F),
    "F32": Field(23, 0xFF),
    "F8_E4M3": Field(3, 0xF),
    "F8_E5M2": Field(2, 0x1F),
}
_PLAIN = Field(0, 0)

_NONE = 0xFFFFFFFF
"""More unchanged elements than a tile has."""


def field_of(dtype: str) -> Field:
    """Bit field of a format's exponent."""
    return FIELDS.get(dtype, _PLAIN)


class Partition(NamedTuple):
    """The classes of one tile."""

    first: int
    """e0."""
    sizes: Counts
    """Elements of each class. [24]"""
    members: Members


def partition(old: Words, dtype: str) -> Partition:
    """Partition of a tile into classes.  [n]."""
    field = field_of(dtype)
    counts = np.zeros(256, np.int64)
    sizes = np.zeros(CLASSES, np.int64)
    _histogram(readonly(old), field.shift, field.mask, counts)
    first = int(_sizes(counts, sizes))
    return Partition(first, sizes, members(old, field, first))


def members(old: Words, field: Field, first: int) -> Members:
    """The class of each element, from e0.  [n] -> [n]."""
    out = np.empty(old.size, np.uint8)
    _members(readonly(old), field.shift, field.mask, np.int32(first), out)
    return out


class ByClass(NamedTuple):
    """Changes sorted by class, then place."""

    starts: Counts
    """Where the changes of each class begin, then how many there are. [25]"""
    gaps: Gaps
    """Unchanged elements of the class since its last changed one. [k]"""
    deltas: Counts
    """Differences as signed numbers. [k]"""

    def fixed(self) -> "ByClass":
        """The same, read-only, for a compiled loop."""
        return ByClass(readonly(self.starts), readonly(self.gaps), readonly(self.deltas))


def unfilled(changed: int) -> ByClass:
    """Uninitialised arrays for a number of changes."""
    return ByClass(
        np.zeros(CLASSES + 1, np.int64), np.empty(changed, np.uint32), np.empty(changed, np.int64)
    )


def by_class(members: Members, index: Indices, delta: Words) -> ByClass:
    """The changes of a tile in the order of their classes.  [n], [k], [k]."""
    changes = unfilled(index.size)
    np.cumsum(np.bincount(members[index], minlength=CLASSES), out=changes.starts[1:])
    _sort(readonly(members), readonly(index), readonly(delta), changes)
    return changes


def in_order(members: Members, changes: ByClass, index: Indices, delta: Words) -> int:
    """Fill index and delta from changes by class; how many lie inside the tile.  [n], k changes."""
    return int(_in_order(readonly(members), changes.fixed(), index, delta))


@compiled
def _histogram(old: Words, shift: int, mask: int, counts: Counts) -> None:
    # Four tables: equal neighbours would wait for each other's increment.
    parts = np.zeros((4, 256), np.int32)
    whole = old.size // 4 * 4
    for i in range(0, whole, 4):
        for j in range(4):
            parts[j, (old[i + j] >> shift) & mask] += 1
    for i in range(whole, old.size):
        parts[0, (old[i] >> shift) & mask] += 1
    for e in range(counts.size):
        counts[e] = parts[0, e] + parts[1, e] + parts[2, e] + parts[3, e]


@compiled
def _sizes(counts: Counts, sizes: Counts) -> int:
    """Fill the sizes of classes from those of exponents; e0."""
    half = (counts.sum() + 1) // 2
    median = 0
    reached = counts[0]
    while reached < half:
        median += 1
        reached += counts[median]
    first = max(0, median - BELOW_MEDIAN)
    for e in range(counts.size):
        sizes[min(max(e - first, 0), CLASSES - 1)] += counts[e]
    return first


@compiled
def _members(old: Words, shift: int, mask: int, first: np.int32, out: Members) -> None:
    for i in range(old.size):
        above = np.int32((old[i] >> shift) & mask) - first
        out[i] = min(max(above, np.int32(0)), np.int32(CLASSES - 1))


@compiled
def _sort(members: Members, index: Indices, delta: Words, changes: ByClass) -> None:
    starts, gaps, deltas = changes
    # As long as a byte reaches: no access needs a check.
    passed = np.zeros(256, np.uint32)
    place = starts.copy()
    extend = np.uint64(64 - 8 * delta.itemsize)
    i = np.int64(0)
    for j in range(index.size):
        stop = np.int64(index[j])
        while i < stop:
            passed[members[i]] += np.uint32(1)
            i += 1
        c = members[i]
        gaps[place[c]] = passed[c]
        # Sign-extended from w bits: shifted up as unsigned, down as signed.
        deltas[place[c]] = np.int64(np.uint64(delta[j]) << extend) >> np.int64(extend)
        place[c] += 1
        passed[c] = 0
        i += 1


@compiled
def _in_order(members: Members, changes: ByClass, index: Indices, delta: Words) -> int:
    starts, gaps, deltas = changes
    place = starts.copy()
    left = np.full(256, _NONE, np.uint32)
    for c in range(CLASSES):
        if starts[c] < starts[c + 1]:
            left[c] = gaps[starts[c]]
    found = 0
    for i in range(members.size):
        c = members[i]
        before = left[c]
        left[c] = before - np.uint32(1)
        if before == 0:
            index[found] = i
            delta[found] = deltas[place[c]]
            found += 1
            place[c] += 1
            left[c] = gaps[place[c]] if place[c] < starts[c + 1] else _NONE
    return found
