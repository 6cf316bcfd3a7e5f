"""Tiles: the fixed pieces of tensors that blocks are cut along.

A tile is a rectangle of one plane of a tensor. With grid G each tile lies inside one of G panels,
so that the ranks of any tensor-parallel degree that divides G can fetch only their own tiles.
"""

import math
from typing import NamedTuple

from etude.common.weights.tensors.schema import Grid, TensorSpec

TILE_ELEMENTS = 262_144
"""Most elements of a tile: smaller ones cost header bits, larger ones cost parallel decoding."""

MIN_PANEL_ELEMENTS = 131_072
"""A panel with fewer elements is not worth a tile of its own."""


class Tile(NamedTuple):
    """Rows [row, row + rows) and columns [column, column + columns) of one plane, row-major."""

    plane: int
    row: int
    column: int
    rows: int
    columns: int

    @property
    def elements(self) -> int:
        return self.rows * self.columns


class Tiling(NamedTuple):
    """Tiling of one tensor; everything about a tile follows from its number."""

    planes: int
    rows: int
    """Of a plane."""
    columns: int
    """Of a plane."""
    panels: int
    by_columns: bool
    """Whether panels are ranges of columns, not of rows."""
    band: int
    """Rows of a tile, but for the last of a panel."""

    @property
    def panel_rows(self) -> int:
        return self.rows if self.by_columns else self.rows // self.panels

    @property
    def panel_columns(self) -> int:
        return self.columns // self.panels if self.by_columns else self.columns

    @property
    def bands(self) -> int:
        """Tiles of one panel."""
        return -(-self.panel_rows // self.band)

    @property
    def tiles(self) -> int:
        """Tiles of the tensor; they are numbered by plane, panel, band."""
        return self.planes * self.panels * self.bands

    def tile(self, number: int) -> Tile:
        """Tile of a number.

        Raises:
            IndexError: there is no tile of this number.
        """
        if not 0 <= number < self.tiles:
            raise IndexError(f"tile {number} of {self.tiles}")
        rest, band = divmod(number, self.bands)
        plane, panel = divmod(rest, self.panels)
        row = band * self.band
        rows = min(self.band, self.panel_rows - row)
        if self.by_columns:
            return Tile(plane, row, panel * self.panel_columns, rows, self.panel_columns)
        return Tile(plane, panel * self.panel_rows + row, 0, rows, self.columns)

    def is_contiguous(self) -> bool:
        """Return true if every tile is one range of the tensor's row-major elements."""
        return not self.by_columns or self.panels == 1


def tiling(spec: TensorSpec, grid: Grid) -> Tiling:
    """Tiling of a tensor.

    Raises:
        ValueError: a row is wider than a tile can be.
    """
    planes, rows, columns = _as_planes(spec)
    by_columns = spec.split == "columns" and columns > 1
    cut = columns if by_columns else rows
    panels: int = grid if cut % grid == 0 else 1
    while panels > 1 and rows * columns // panels < MIN_PANEL_ELEMENTS:
        panels //= 2
    width = columns // panels if by_columns else columns
    if width > TILE_ELEMENTS:
        raise ValueError(
            f"tensor {spec.name!r}: a row of {width} elements is wider than {TILE_ELEMENTS}"
        )
    return Tiling(planes, rows, columns, panels, by_columns, max(1, TILE_ELEMENTS // max(1, width)))


def _as_planes(spec: TensorSpec) -> tuple[int, int, int]:
    """Planes, rows and columns: a vector is one column, stacked matrices are planes."""
    if len(spec.shape) < 2:
        return 1, spec.elements, 1
    *stacked, rows, columns = spec.shape
    return math.prod(stacked), rows, columns
