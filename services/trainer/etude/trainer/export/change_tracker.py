"""Change tracker: the elements that optimiser steps changed since a version, with their old bits.

For each parameter: the positions that steps touched since the version, and the bits that were
there first. The new bits are read when a version is packed. If too many positions of a parameter
are touched for a list, all its old bits are kept instead, up to a limit over all parameters: a
small fp32 model, whose steps touch everything, still publishes deltas.
"""

from typing import NamedTuple

import numpy as np
from torch import Tensor

from etude.common.weights.tensors.jit import compiled, readonly
from etude.common.weights.tensors.words import Words
from etude.trainer.export.touched import MOST_TOUCHED, Flat, TouchedElements
from etude.trainer.model import tensor_bits

MOST_KEPT_BYTES = 256 << 20
"""Limit of complete old shards on one rank; beyond it the next version replaces the parameters,
which costs more bytes in the store and none here."""


class OldShard(NamedTuple):
    """A complete parameter shard as of the version; any element may have changed since."""

    old: Words
    """[n]"""


Changes = dict[str, TouchedElements | OldShard | None]
"""By parameter; None if too much changed to be kept, absent if nothing changed."""


class ChangeTracker:
    """Tracks changes of one rank's parameters while it is armed."""

    def __init__(self, *, most_kept_bytes: int = MOST_KEPT_BYTES) -> None:
        self._changes: Changes | None = None
        self._most_kept_bytes = most_kept_bytes

    @property
    def is_armed(self) -> bool:
        """True while changes are tracked; otherwise a step costs nothing extra."""
        return self._changes is not None

    def disarm(self) -> None:
        """Stop tracking: the weights are not those of a version."""
        self._changes = None

    def wants(self, name: str) -> bool:
        """True if a step of this parameter must be recorded."""
        if self._changes is None:
            return False
        return name not in self._changes or isinstance(self._changes[name], TouchedElements)

    def record(self, name: str, old: Tensor, new: Tensor) -> None:
        """Record one step of one parameter.

        Args:
            name: of the parameter.
            old: raw bits of its shard before the step, as wire.bits() gives them. [n]
            new: raw bits after the step. [n]
        """
        if self._changes is None:
            return
        found: TouchedElements | OldShard | None = find_differences(old, new)
        before = self._changes.get(name, _UNTOUCHED)
        if isinstance(before, TouchedElements):
            both = merge_touched(before, found, elements=old.numel())
            found = self._remember_whole(before, old) if both is None else both
        else:
            found = before
        if not isinstance(found, TouchedElements) or found.flat.size:
            self._changes[name] = found

    def take_changes(self) -> Changes:
        """Return the changes so far, and track from the current weights on."""
        taken, self._changes = self._changes or {}, {}
        return taken

    def _remember_whole(self, before: TouchedElements, old: Tensor) -> OldShard | None:
        """All bits of the version, from the bits before a step and the elements touched earlier."""
        kept = [found for found in (self._changes or {}).values() if isinstance(found, OldShard)]
        words = tensor_bits.bits_to_words(old)
        if sum(found.old.nbytes for found in kept) + words.nbytes > self._most_kept_bytes:
            return None
        return overlay_old_bits(before, words)


def find_differences(old: Tensor, new: Tensor) -> TouchedElements | None:
    """Find the positions where raw bits differ, with the old bits; None if there are too many.

    Args:
        old: signed integers on any device. [n]
        new: of the same shape and device. [n]
    """
    most = int(old.numel() * MOST_TOUCHED)
    if old.is_cuda:
        places = (old != new).nonzero().flatten()
        if places.numel() > most:
            return None
        return TouchedElements(places.cpu().numpy(), tensor_bits.bits_to_words(old[places]))
    before = tensor_bits.bits_to_words(old)
    # Pages that stay untouched take no memory.
    flat, values = np.empty(most, np.int64), np.empty(most, before.dtype)
    count = _differences(readonly(before), readonly(tensor_bits.bits_to_words(new)), flat, values)
    return None if count < 0 else TouchedElements(flat[:count].copy(), values[:count].copy())


def merge_touched(
    first: TouchedElements | OldShard | None,
    then: TouchedElements | OldShard | None,
    *,
    elements: int,
) -> TouchedElements | OldShard | None:
    """Merge the changes of two consecutive periods of a shard with this number of elements."""
    if not isinstance(first, TouchedElements) or then is None:
        return first if isinstance(first, OldShard) else None
    if isinstance(then, OldShard):
        return overlay_old_bits(first, then.old)
    most = first.flat.size + then.flat.size
    flat, values = np.empty(most, np.int64), np.empty(most, then.old.dtype)
    earlier = TouchedElements(
        readonly(first.flat), readonly(first.old.astype(then.old.dtype, copy=False))
    )
    later = TouchedElements(readonly(then.flat), readonly(then.old))
    count = _merge(earlier, later, flat, values)
    if count > int(elements * MOST_TOUCHED):
        return None
    return TouchedElements(flat[:count].copy(), values[:count].copy())


def overlay_old_bits(first: TouchedElements, then: Words) -> OldShard:
    """Restore the bits before a period from the touched elements and all bits after it. [n]."""
    words = then.copy()
    words[first.flat] = first.old
    return OldShard(words)


def merge_changes(first: Changes, then: Changes, *, elements: dict[str, int]) -> Changes:
    """Merge the changes of two consecutive periods of all parameters."""
    everything = first | then
    for name in first.keys() & then.keys():
        everything[name] = merge_touched(first[name], then[name], elements=elements[name])
    return everything


_UNTOUCHED = TouchedElements(np.empty(0, np.int64), np.empty(0, np.uint8))


@compiled
def _differences(old: Words, new: Words, flat: Flat, values: Words) -> int:
    """Fill flat and values; return their count, or -1 if they do not fit."""
    count = 0
    per_word = 8 // old.itemsize
    words = old.size // per_word
    # Eight bytes are compared at once: most hold no change.
    before = old[: words * per_word].view(np.uint64)
    after = new[: words * per_word].view(np.uint64)
    for word in range(words + 1):
        if word < words and before[word] == after[word]:
            continue
        for place in range(word * per_word, min((word + 1) * per_word, old.size)):
            if old[place] != new[place]:
                if count == flat.size:
                    return -1
                flat[count] = place
                values[count] = old[place]
                count += 1
    return count


@compiled
def _merge(first: TouchedElements, then: TouchedElements, flat: Flat, values: Words) -> int:
    """Merge two sorted lists; if both have a position, the first one's value wins."""
    count, i, j = 0, 0, 0
    places, old = first
    later_places, later_old = then
    while i < places.size or j < later_places.size:
        if j == later_places.size or (i < places.size and places[i] <= later_places[j]):
            if j < later_places.size and later_places[j] == places[i]:
                j += 1
            flat[count], values[count] = places[i], old[i]
            i += 1
        else:
            flat[count], values[count] = later_places[j], later_old[j]
            j += 1
        count += 1
    return count
