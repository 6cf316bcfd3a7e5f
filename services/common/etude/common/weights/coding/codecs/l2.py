"""L2 and L2r: changes by class of their old exponent, which the receiver has too.

L2 (what = "rice") is the payload of `l2_rice.py`, whose classes can be decoded in parallel. L2r
(what = "rans") is the one stream of `l2r_write.py`: fewer bytes, and decoded in one sequence. Both
are empty if nothing changed, have no flags, and are for whole tiles of words of up to 32 bits:
a part of a tile, or wider words, take L1.
"""

from typing import Literal, NamedTuple

import numpy as np
from typing_extensions import Buffer

from etude.common.errors import CorruptError
from etude.common.weights.coding.codecs import classes, l2_rice, l2r_read, l2r_write
from etude.common.weights.coding.codecs.classes import ByClass, Members
from etude.common.weights.coding.codecs.ids import Encoded
from etude.common.weights.tensors.changes import BlockChanges
from etude.common.weights.tensors.tiles import TILE_ELEMENTS
from etude.common.weights.tensors.words import Words

What = Literal["rice", "rans"]

_MAX_WORD_BYTES = 4


def encode(old: Words, changes: BlockChanges, *, dtype: str, what: What) -> Encoded:
    """The payload of a whole tile's changes.  [n], k changes.

    Raises:
        ValueError: the tile is too large or of words that are too wide, places do not increase
            or lie outside it, or a difference is 0.
    """
    if not _is_tile(old):
        raise ValueError(f"{old.dtype}{list(old.shape)} is no tile that L2 codes")
    index, delta = changes
    if delta.dtype != old.dtype or delta.size != index.size:
        raise ValueError(f"{delta.size} {delta.dtype} differences, {index.size} places")
    if not index.size:
        return Encoded(b"", 0)
    if index[-1] >= old.size or (index[1:] <= index[:-1]).any() or (delta == 0).any():
        raise ValueError("changes are not strictly increasing, outside of the tile, or 0")
    parts = classes.partition(old, dtype)
    sorted_changes = classes.by_class(parts.members, index, delta)
    if what == "rice":
        return Encoded(l2_rice.encode(parts.first, sorted_changes), 0)
    word_bits = 8 * old.dtype.itemsize
    return Encoded(l2r_write.encode(parts.sizes, sorted_changes, word_bits=word_bits), 0)


def decode(  # noqa: PLR0913 - what the index says of a block, and its tile
    payload: Buffer,
    old: Words,
    *,
    changed: int,
    flags: int,
    dtype: str,
    where: str,
    what: What,
) -> BlockChanges:
    """The changes of a whole tile.  [n] -> k changes.

    Raises:
        CorruptError: not what encode() writes for a tile with these changes, or no tile that
            it takes.
    """
    if not _is_tile(old):
        # The block names its codec: it is wrong, not the caller.
        raise CorruptError(f"{where}: codec: L2 of {old.dtype}{list(old.shape)}")
    data = memoryview(payload).cast("B")
    if flags:
        raise CorruptError(f"{where}: flags: {flags} is unknown to L2")
    if not 0 <= changed <= old.size:
        raise CorruptError(f"{where}: changed: {changed} of {old.size} elements")
    if not changed and len(data):
        raise CorruptError(f"{where}: {len(data)} bytes without a change")
    index, delta = np.empty(changed, np.uint32), np.empty(changed, old.dtype)
    if changed:
        tile = _Tile(old, dtype, changed)
        found = _rice(data, tile, where) if what == "rice" else _rans(data, tile, where)
        if classes.in_order(found.members, found.changes, index, delta) != changed:
            raise CorruptError(f"{where}: gaps: a place beyond its class")
    return BlockChanges(index, delta)


def _is_tile(old: Words) -> bool:
    return old.ndim == 1 and old.size <= TILE_ELEMENTS and old.dtype.itemsize <= _MAX_WORD_BYTES


class _Tile(NamedTuple):
    old: Words
    dtype: str
    changed: int

    @property
    def word_bits(self) -> int:
        return 8 * self.old.dtype.itemsize


class _Found(NamedTuple):
    members: Members
    changes: ByClass


def _rice(data: memoryview, tile: _Tile, where: str) -> _Found:
    found = classes.unfilled(tile.changed)
    field = classes.field_of(tile.dtype)
    first = l2_rice.decode(data, found, word_bits=tile.word_bits, mask=field.mask, where=where)
    return _Found(classes.members(tile.old, field, first), found)


def _rans(data: memoryview, tile: _Tile, where: str) -> _Found:
    found = classes.unfilled(tile.changed)
    parts = classes.partition(tile.old, tile.dtype)
    l2r_read.decode(data, parts.sizes, found, word_bits=tile.word_bits, where=where)
    return _Found(parts.members, found)
