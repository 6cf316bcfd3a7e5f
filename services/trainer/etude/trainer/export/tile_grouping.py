"""Changes of a shard sorted into the tiles that they lie in."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from etude.common.weights.tensors.jit import compiled, readonly
from etude.common.weights.tensors.tiles import Tiling
from etude.common.weights.tensors.words import Indices

Integers = npt.NDArray[np.int64]


class Shard(NamedTuple):
    """Elements [start, stop) of a tensor, row-major: what one rank of a trainer holds of it."""

    start: int
    stop: int


class TileRange(NamedTuple):
    """The part of a tile that a shard holds."""

    tile: int
    lo: int
    hi: int


class GroupedChanges(NamedTuple):
    """Changes by tile; within a tile in order of place."""

    tiles: Integers
    """Those with changes, increasing. [t]"""
    bounds: Integers
    """Changes [bounds[i], bounds[i + 1]) lie in tiles[i]. [t + 1]"""
    local: Indices
    """Place of each in its tile. [k]"""
    order: Integers | None
    """Which change each was; None if they kept their order. [k]"""


def group_by_tile(flat: Integers, tiling: Tiling) -> GroupedChanges:
    """Sort changes, given by their increasing positions in the tensor, into tiles.  [k]."""
    if tiling.is_contiguous():
        starts = _starts(tiling)
        bounds = np.append(np.searchsorted(flat, starts), flat.size)
        tiles = np.flatnonzero(np.diff(bounds))
        bounds = np.append(bounds[tiles], flat.size)
        local = (flat - np.repeat(starts[tiles], np.diff(bounds))).astype(np.uint32)
        return GroupedChanges(tiles, bounds, local, None)
    ends = np.zeros(tiling.tiles + 1, np.int64)
    order = np.empty(flat.size, np.int64)
    spread = np.empty(flat.size, np.uint32)
    sizes = (tiling.rows, tiling.columns, tiling.panel_columns, tiling.bands, tiling.band)
    _spread(readonly(flat), sizes, ends, order, spread)
    tiles = np.flatnonzero(np.diff(ends))
    return GroupedChanges(tiles, np.append(ends[tiles], flat.size), spread, order)


def tile_ranges(shard: Shard, tiling: Tiling) -> list[TileRange]:
    """Ranges of all tiles that a shard overlaps."""
    if shard.start >= shard.stop:
        return []
    plane = tiling.rows * tiling.columns
    first = shard.start // plane * tiling.panels * tiling.bands
    last = ((shard.stop - 1) // plane + 1) * tiling.panels * tiling.bands
    found = [tile_range(tile, shard, tiling) for tile in range(first, last)]
    return [each for each in found if each.lo < each.hi]


def tile_range(tile: int, shard: Shard, tiling: Tiling) -> TileRange:
    """Range of a tile that a shard holds; may be empty."""
    return TileRange(
        tile,
        _elements_before(tile, shard.start, tiling),
        _elements_before(tile, shard.stop, tiling),
    )


def _elements_before(number: int, flat: int, tiling: Tiling) -> int:
    """Number of a tile's elements before a position of the tensor."""
    tile = tiling.tile(number)
    row, column = divmod(flat - tile.plane * tiling.rows * tiling.columns, tiling.columns)
    inside = min(max(0, column - tile.column), tile.columns)
    return min(max(0, (row - tile.row) * tile.columns + inside), tile.elements)


def _starts(tiling: Tiling) -> Integers:
    """Position of the first element of each tile, where tiles are ranges of the tensor."""
    rest, band = np.divmod(np.arange(tiling.tiles), tiling.bands)
    plane, panel = np.divmod(rest, tiling.panels)
    row = plane * tiling.rows + panel * tiling.panel_rows + band * tiling.band
    starts: Integers = (row * tiling.columns).astype(np.int64)
    return starts


@compiled
def _spread(
    flat: Integers,
    sizes: tuple[int, int, int, int, int],
    ends: Integers,
    order: Integers,
    local: Indices,
) -> None:
    """A counting sort by tile, for tiles that are ranges of columns."""
    rows, columns, width, bands, band = sizes
    panels = columns // width
    tiles = np.empty(flat.size, np.int64)
    places = np.empty(flat.size, np.uint32)
    row = np.int64(0)
    stop = np.int64(0)
    for i in range(flat.size):
        if flat[i] >= stop:
            row = flat[i] // columns
            stop = (row + 1) * columns
        column = flat[i] - stop + columns
        plane = row // rows
        inside = row - plane * rows
        panel = column // width
        number = inside // band
        tiles[i] = (plane * panels + panel) * bands + number
        places[i] = (inside - number * band) * width + column - panel * width
        ends[tiles[i] + 1] += 1
    for i in range(1, ends.size):
        ends[i] += ends[i - 1]
    taken = ends[:-1].copy()
    for i in range(flat.size):
        at = taken[tiles[i]]
        taken[tiles[i]] += 1
        order[at] = i
        local[at] = places[i]
