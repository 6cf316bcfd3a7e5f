"""Changes of a block: the elements that changed, and by how much."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from etude.common.weights.tensors import ulp
from etude.common.weights.tensors.jit import compiled, readonly
from etude.common.weights.tensors.words import Indices, Words


class BlockChanges(NamedTuple):
    """The changed elements of one block."""

    index: Indices  # type: ignore[assignment] # the field is more wanted than tuple.index()
    """Places counted from the block's first element, strictly increasing. [k]"""
    delta: Words
    """Distance on the axis mod 2^w, never 0; words of the tensor's type. [k]"""


def diff_words(old: Words, new: Words, *, ordered: bool) -> BlockChanges:
    """The changes that lead from one state of a block to another.  [n], [n] -> k changes."""
    index = changed_places(old, new).astype(np.uint32)
    return BlockChanges(index, ulp.delta(old[index], new[index], ordered=ordered))


def apply_changes(old: Words, changes: BlockChanges, *, ordered: bool) -> Words:
    """The block after its changes: inverse of diff_words().  [n] -> [n]."""
    new = old.copy()
    new[changes.index] = ulp.add_ulps(old[changes.index], changes.delta, ordered=ordered)
    return new


def changed_places(old: Words, new: Words) -> npt.NDArray[np.int64]:
    """Places at which two states of the same words differ, increasing.  [n], [n] -> [k].

    Raises:
        ValueError: they are not of one type and length.
    """
    if old.dtype != new.dtype or old.shape != new.shape:
        raise ValueError(f"{old.dtype}{list(old.shape)} against {new.dtype}{list(new.shape)}")
    # Pages of it that are never written cost no memory.
    found = np.empty(old.size, np.int64)
    old, new = readonly(old), readonly(new)
    whole = old.nbytes // 8 * 8 // old.itemsize
    wide = old[:whole].view(np.uint64), new[:whole].view(np.uint64)
    count = _differing(*wide, old, new, found)
    return found[:count].copy()


@compiled
def _differing(
    wide_old: npt.NDArray[np.uint64],
    wide_new: npt.NDArray[np.uint64],
    old: Words,
    new: Words,
    found: npt.NDArray[np.int64],
) -> int:
    """Fill found; most words are equal, so eight bytes are passed over at a time."""
    count = 0
    per = 8 // old.itemsize
    for wide in range(wide_old.size):
        if wide_old[wide] != wide_new[wide]:
            for i in range(wide * per, wide * per + per):
                found[count] = i
                count += old[i] != new[i]
    for i in range(wide_old.size * per, old.size):
        found[count] = i
        count += old[i] != new[i]
    return count
