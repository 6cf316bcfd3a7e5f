"""Selection of the blocks of an index that a rank needs."""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from etude.common.weights.coding.block_index import Index
from etude.common.weights.coding.codecs.ids import WHOLE_TENSOR
from etude.common.weights.replicas.regions import Region, Regions, slice_regions
from etude.common.weights.tensors.schema import Schema, TensorSpec
from etude.common.weights.tensors.tiles import Tiling, tiling

Mask = npt.NDArray[np.bool_]
BlockSelector = Callable[[Index], Mask]
"""True for the rows to read.  [n] -> [n]."""


def select_all(index: Index) -> Mask:
    """All of them."""
    return np.ones(len(index), np.bool_)


def select_slice(schema: Schema, rank: int, ranks: int) -> BlockSelector:
    """Blocks of the slice that one tensor-parallel rank holds of plain tensors."""
    return select_regions(schema, slice_regions(schema, rank, ranks))


def select_regions(schema: Schema, regions: Regions) -> BlockSelector:
    """Blocks that have elements in some regions; a few more where regions are cut oddly."""

    def select(index: Index) -> Mask:
        found = np.zeros(len(index), np.bool_)
        for tensor in np.unique(index.tensor).tolist():
            here = np.flatnonzero(index.tensor == tensor)
            held = regions.get(tensor, ())
            if held:
                found[here] = _overlap_mask(index, here, schema.tensors[tensor], schema, held)
        return found

    return select


def _overlap_mask(
    index: Index,
    here: npt.NDArray[np.int64],
    spec: TensorSpec,
    schema: Schema,
    held: Sequence[Region],
) -> Mask:
    cut = tiling(spec, schema.grid)
    tiles = index.tile[here].astype(np.int64)
    first, last, left = _extent(tiles, index.lo[here], index.hi[here], cut)
    whole = index.tile[here] == WHOLE_TENSOR
    met = np.zeros(here.size, np.bool_)
    for region in held:
        # Of the region's rows that start before the block ends, the last reaches furthest.
        stride = max(1, region.source_stride)
        row = np.minimum((last - region.source_offset) // stride, region.rows - 1)
        stop = region.source_offset + row * stride + region.width
        inside = (row >= 0) & (first < stop)
        if region.source_stride == cut.columns and not cut.is_contiguous():
            # Rows of both are rows of the matrix: columns decide as well.
            begin = region.source_offset % cut.columns
            end = begin + region.width
            inside &= (left < end) & (left + cut.panel_columns > begin) | (end > cut.columns)
        met |= inside
    met |= whole
    return met


def _extent(
    tiles: npt.NDArray[np.int64],
    lo: npt.NDArray[np.uint32],
    hi: npt.NDArray[np.uint32],
    cut: Tiling,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """First and last position of each block in the tensor, and its first column."""
    rest, band = np.divmod(tiles, cut.bands)
    plane, panel = np.divmod(rest, cut.panels)
    row, column = band * cut.band, panel * cut.panel_columns
    if not cut.by_columns:
        row, column = row + panel * cut.panel_rows, np.zeros_like(panel)
    base = (plane * cut.rows + row) * cut.columns + column
    ends = []
    for local in (lo.astype(np.int64), hi.astype(np.int64) - 1):
        down, along = np.divmod(local, cut.panel_columns)
        ends.append(base + down * cut.columns + along)
    return ends[0], ends[1], column
