"""Which elements differ from those of a version, at the cost of what changed.

For each parameter: the places that an optimiser step touched since the version, and the bits
that were there. The first old bits count, whatever later steps do; what they are now is read
when a version is packed.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from etude.common.weights.jit import compiled, fixed
from etude.common.weights.words import Words
from etude.trainer import wire

Flat = npt.NDArray[np.int64]

MOST_TOUCHED = 0.25
"""Above this share whole blocks are smaller than changes, and so is not remembering them."""


class Touched(NamedTuple):
    """Elements of one parameter's shard that may have changed."""

    flat: Flat
    """Row-major in the shard, increasing. [k]"""
    old: Words
    """What the version has there. [k]"""


Changes = dict[str, Touched | None]
"""By parameter; None where too much changed to be listed, absent where nothing did."""


class Tracker:
    """Follows the parameters of one rank, once it is armed."""

    def __init__(self) -> None:
        self._changes: Changes | None = None

    @property
    def is_armed(self) -> bool:
        """Whether changes are followed; before, a step costs nothing more."""
        return self._changes is not None

    def arm(self) -> None:
        """Follow changes from the present weights on; earlier ones are forgotten."""
        self._changes = {}

    def disarm(self) -> None:
        """Follow nothing: the weights are those of no version."""
        self._changes = None

    def wants(self, name: str) -> bool:
        """Whether a step of this parameter must be recorded."""
        return self._changes is not None and self._changes.get(name, ()) is not None

    def record(self, name: str, old: Tensor, new: Tensor) -> None:
        """Take in one step of one parameter.

        Args:
            name: of the parameter.
            old: raw bits of its shard before the step, as wire.bits() gives them. [n]
            new: likewise after it. [n]
        """
        if self._changes is None:
            return
        found = differences(old, new)
        if name in self._changes:
            found = merged(self._changes[name], found, elements=old.numel())
        if found is None or found.flat.size:
            self._changes[name] = found

    def take(self) -> Changes:
        """What changed since it was armed or last asked; what follows is counted from here."""
        taken, self._changes = self._changes or {}, {}
        return taken


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


def merged(first: Touched | None, then: Touched | None, *, elements: int) -> Touched | None:
    """The changes of two periods, one after the other, of a shard of so many elements."""
    if first is None or then is None:
        return None
    most = first.flat.size + then.flat.size
    flat, values = np.empty(most, np.int64), np.empty(most, first.old.dtype)
    count = _merge(
        (fixed(first.flat), fixed(first.old)), (fixed(then.flat), fixed(then.old)), flat, values
    )
    if count > int(elements * MOST_TOUCHED):
        return None
    return Touched(flat[:count].copy(), values[:count].copy())


def joined(first: Changes, then: Changes, *, elements: dict[str, int]) -> Changes:
    """Likewise of all parameters, given the elements of each."""
    everything = first | then
    for name in first.keys() & then.keys():
        everything[name] = merged(first[name], then[name], elements=elements[name])
    return everything


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
def _merge(first: tuple[Flat, Words], then: tuple[Flat, Words], flat: Flat, values: Words) -> int:
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
