"""Which elements differ from those of a version, at the cost of what changed.

For each parameter: the places that an optimiser step touched since the version, and the bits
that were there. The first old bits count, whatever later steps do; what they are now is read
when a version is packed. Of a parameter in which too many places are touched for a list, all old
bits are kept instead, as long as those of all such parameters together are small: a model whose
steps touch everything, as those of a small fp32 model do, still publishes what changed.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from etude.common.weights.tensors.jit import compiled, fixed
from etude.common.weights.tensors.words import Words
from etude.trainer import wire

Flat = npt.NDArray[np.int64]

MOST_TOUCHED = 0.25
"""Above this share all old bits take less memory than a list of places and bits."""

MOST_KEPT_BYTES = 256 << 20
"""Of parameters that are kept whole, on one rank: beyond, the next version replaces them, which
costs more bytes in the store and none here."""


class Touched(NamedTuple):
    """Elements of one parameter's shard that may have changed."""

    flat: Flat
    """Row-major in the shard, increasing. [k]"""
    old: Words
    """What the version has there. [k]"""


class Whole(NamedTuple):
    """One parameter's shard as it is in the version, of which any element may have changed."""

    old: Words
    """[n]"""


Changes = dict[str, Touched | Whole | None]
"""By parameter; None where too much changed to be remembered, absent where nothing did."""


class Tracker:
    """Follows the parameters of one rank, while it is armed."""

    def __init__(self, *, most_kept_bytes: int = MOST_KEPT_BYTES) -> None:
        self._changes: Changes | None = None
        self._most_kept_bytes = most_kept_bytes

    @property
    def is_armed(self) -> bool:
        """Whether changes are followed; before, a step costs nothing more."""
        return self._changes is not None

    def disarm(self) -> None:
        """Follow nothing: the weights are those of no version."""
        self._changes = None

    def wants(self, name: str) -> bool:
        """Whether a step of this parameter must be recorded."""
        if self._changes is None:
            return False
        return name not in self._changes or isinstance(self._changes[name], Touched)

    def record(self, name: str, old: Tensor, new: Tensor) -> None:
        """Take in one step of one parameter.

        Args:
            name: of the parameter.
            old: raw bits of its shard before the step, as wire.bits() gives them. [n]
            new: likewise after it. [n]
        """
        if self._changes is None:
            return
        found: Touched | Whole | None = differences(old, new)
        before = self._changes.get(name, _UNTOUCHED)
        if isinstance(before, Touched):
            both = merged(before, found, elements=old.numel())
            found = self._whole(before, old) if both is None else both
        else:
            found = before
        if not isinstance(found, Touched) or found.flat.size:
            self._changes[name] = found

    def rearm(self) -> Changes:
        """Follow changes from the present weights on; what changed since it was last armed."""
        taken, self._changes = self._changes or {}, {}
        return taken

    def _whole(self, before: Touched, old: Tensor) -> Whole | None:
        """All bits of the version, given those before a step and what earlier ones touched."""
        kept = [found for found in (self._changes or {}).values() if isinstance(found, Whole)]
        words = wire.as_words(old)
        if sum(found.old.nbytes for found in kept) + words.nbytes > self._most_kept_bytes:
            return None
        return overlaid(before, words)


def differences(old: Tensor, new: Tensor) -> Touched | None:
    """Where two tensors of raw bits differ, and the old bits there; None if in too many places.

    Args:
        old: signed integers on any device. [n]
        new: likewise. [n]
    """
    most = int(old.numel() * MOST_TOUCHED)
    if old.is_cuda:
        places = (old != new).nonzero().flatten()
        if places.numel() > most:
            return None
        return Touched(places.cpu().numpy(), wire.as_words(old[places]))
    before = wire.as_words(old)
    # Pages that stay untouched take no memory.
    flat, values = np.empty(most, np.int64), np.empty(most, before.dtype)
    count = _differences(fixed(before), fixed(wire.as_words(new)), flat, values)
    return None if count < 0 else Touched(flat[:count].copy(), values[:count].copy())


def merged(
    first: Touched | Whole | None, then: Touched | Whole | None, *, elements: int
) -> Touched | Whole | None:
    """The changes of two periods, one after the other, of a shard of so many elements."""
    if not isinstance(first, Touched) or then is None:
        return first if isinstance(first, Whole) else None
    if isinstance(then, Whole):
        return overlaid(first, then.old)
    most = first.flat.size + then.flat.size
    flat, values = np.empty(most, np.int64), np.empty(most, then.old.dtype)
    earlier = Touched(fixed(first.flat), fixed(first.old.astype(then.old.dtype, copy=False)))
    later = Touched(fixed(then.flat), fixed(then.old))
    count = _merge(earlier, later, flat, values)
    if count > int(elements * MOST_TOUCHED):
        return None
    return Touched(flat[:count].copy(), values[:count].copy())


def overlaid(first: Touched, then: Words) -> Whole:
    """The bits before a period that touched some places, given all bits after it.  [n]."""
    words = then.copy()
    words[first.flat] = first.old
    return Whole(words)


def joined(first: Changes, then: Changes, *, elements: dict[str, int]) -> Changes:
    """Likewise of all parameters, given the elements of each."""
    everything = first | then
    for name in first.keys() & then.keys():
        everything[name] = merged(first[name], then[name], elements=elements[name])
    return everything


_UNTOUCHED = Touched(np.empty(0, np.int64), np.empty(0, np.uint8))


@compiled
def _differences(old: Words, new: Words, flat: Flat, values: Words) -> int:
    """Fills flat and values; returns how many, or -1 if they do not fit."""
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
def _merge(first: Touched, then: Touched, flat: Flat, values: Words) -> int:
    """The union of two sorted lists; where both have a place, the first one's value counts."""
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
