"""Validation of index rows, so that no declared value can do harm."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from etude.common.weights.coding.block_index import Index
from etude.common.weights.coding.codecs.ids import FLAGS, WHOLE_TENSOR, Codec
from etude.common.weights.tensors.schema import Schema
from etude.common.weights.tensors.tiles import Tiling, tiling
from etude.common.weights.tensors.words import word_type

Integers = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

_HEADER_BYTES = 64
_CODED_BYTES = 4
"""No writer keeps a payload larger than the words and this much per element, and a header."""


class _Tiles(NamedTuple):
    """Of each row: its tensor's numbers."""

    elements: Integers
    """Of its tile; 0 if there is no such tile."""
    word_bytes: Integers


def find_fault(index: Index, schema: Schema, *, payload_bytes: int) -> str:
    """The first row that is wrong and its field; empty if all are right."""
    if not len(index):
        return "" if payload_bytes == 0 else f"no blocks in {payload_bytes} bytes of payloads"
    if index.tensor.max() >= len(schema.tensors):
        return _describe_row(
            index.tensor >= len(schema.tensors), "tensor: there is none of that number"
        )
    tiles = _tiles(index, schema)
    for wrong, what in (*_row_rules(index, tiles), *_order_rules(index, payload_bytes)):
        if wrong.any():
            return _describe_row(wrong, what)
    return ""


def _describe_row(wrong: Mask, what: str) -> str:
    return f"block {int(np.argmax(wrong))}: {what}"


def _row_rules(index: Index, tiles: _Tiles) -> list[tuple[Mask, str]]:
    """Rules for a single row."""
    lo, hi = index.lo.astype(np.int64), index.hi.astype(np.int64)
    size = hi - lo
    flags = np.full(256, 255, np.uint8)
    for codec, known in FLAGS.items():
        flags[codec] = ~np.uint8(known)
    is_baseline = index.codec == Codec.XOR_ZSTD
    needs_all = (index.codec == Codec.L2) | (index.codec == Codec.L2R)
    most = size * (tiles.word_bytes + _CODED_BYTES) + _HEADER_BYTES
    return [
        (~np.isin(index.codec, list(Codec)), "codec: unknown"),
        ((index.flags & flags[index.codec]) != 0, "flags: unknown to the codec"),
        (is_baseline != (index.tile == WHOLE_TENSOR), "tile: not one of its codec"),
        (tiles.elements == 0, "tile: the tensor has no such tile"),
        ((size <= 0) | (hi > tiles.elements), "hi: outside of the tile"),
        (needs_all & (size != tiles.elements), "lo: the codec takes whole tiles only"),
        ((index.changed == 0) | (index.changed > size), "changed: not in 1 to hi - lo"),
        ((index.length == 0) | (index.length > most), "length: no writer makes such a block"),
    ]


def _order_rules(index: Index, payload_bytes: int) -> list[tuple[Mask, str]]:
    """Rules for a row and the one before it."""
    place = (index.tensor.astype(np.uint64) << np.uint64(32)) | index.tile
    stop = index.offset + index.length
    wrapped = stop < index.offset
    starts = np.concatenate([np.zeros(1, np.uint64), stop[:-1]])
    same_tile = np.concatenate([[False], place[1:] == place[:-1]])
    before = np.concatenate([[0], index.hi[:-1]])
    descends = np.concatenate([[False], place[1:] < place[:-1]])
    # The baseline's one block of a tensor sorts behind its tiles and must have none beside it.
    mixed = np.concatenate([[False], index.tensor[1:] == index.tensor[:-1]])
    mixed &= (index.tile == WHOLE_TENSOR) & ~same_tile
    last = np.zeros(len(index), np.bool_)
    last[-1] = stop[-1] != payload_bytes
    return [
        (descends, "tile: not sorted"),
        (same_tile & (index.lo < before), "lo: overlaps the block before"),
        (mixed, "tile: the whole tensor besides its tiles"),
        (wrapped | (index.offset != starts), "offset: not where the payload before ends"),
        (last, "length: the last payload does not end at the index"),
    ]


def _tiles(index: Index, schema: Schema) -> _Tiles:
    numbers, inverse = np.unique(index.tensor, return_inverse=True)
    specs = [schema.tensors[number] for number in numbers]
    cuts = [tiling(spec, schema.grid) if spec.elements else _NONE for spec in specs]

    def column(values: list[int]) -> Integers:
        return np.array(values, np.int64)[inverse]

    bands = column([cut.bands for cut in cuts])
    tile = index.tile.astype(np.int64)
    row = tile % bands * column([cut.band for cut in cuts])
    rows = np.minimum(
        column([cut.band for cut in cuts]), column([cut.panel_rows for cut in cuts]) - row
    )
    elements = rows * column([cut.panel_columns for cut in cuts])
    elements[tile >= column([cut.tiles if cut is not _NONE else 0 for cut in cuts])] = 0
    whole = index.tile == WHOLE_TENSOR
    elements[whole] = column([spec.elements for spec in specs])[whole]
    return _Tiles(elements, column([word_type(spec.dtype).itemsize for spec in specs]))


_NONE = Tiling(planes=1, rows=1, columns=1, panels=1, by_columns=False, band=1)
"""Stands in for the tiles of a tensor without elements, which has none."""
