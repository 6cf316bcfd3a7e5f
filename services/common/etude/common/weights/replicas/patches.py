"""A version that is ready to be written: every old and new word that it touches on one rank."""

from collections.abc import Callable
from typing import NamedTuple

from etude.common.weights.tensors.digest import Digest
from etude.common.weights.tensors.words import Indices, Words


class Patch(NamedTuple):
    """New words for one parameter, with the old ones that undo them."""

    parameter: str
    base: int
    """What positions are counted from: a parameter may have more words than 2^32."""
    positions: Indices | Callable[[], Indices]
    """Words of the parameter; a function where nearly all of a block change, to save memory."""
    old: Words
    new: Words

    @property
    def word_positions(self) -> Indices:
        return self.positions() if callable(self.positions) else self.positions

    @property
    def num_bytes(self) -> int:
        held = 0 if callable(self.positions) else self.positions.nbytes
        return held + self.old.nbytes + self.new.nbytes


class PreparedPatches(NamedTuple):
    """Gathered before anything is written, so that every write can be repeated and undone."""

    patches: tuple[Patch, ...]
    digest: Digest
    """What the change adds to the state digest of the elements that this rank counts."""
    changed: int
    """Counted elements that change."""

    @property
    def num_bytes(self) -> int:
        return sum(patch.num_bytes for patch in self.patches)
