"""Tiles of a delta: their positions in a buffer of words and in the digest's global index.

A tile is a rectangle: `elements` of a buffer in rows of `width`, `pitch` elements apart. They are
numbered row-major. A tile of one row is contiguous, which is what a scan needs; a tile cut from
columns has several rows, and its rows lie apart in the global index too.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from etude.kernels.raw_words import lanes_per_element

TILE_ELEMENTS = 262_144
"""Most elements of a tile."""

CHUNK = 4096
"""Elements of a tile that one program scans; no result depends on it."""

MAX_ALIGN = 16
"""Elements: enough for the widest load of any word."""

Column = npt.NDArray[np.int64]


class Rectangle(NamedTuple):
    """One tile: `rows` of `width` elements; lanes are 16-bit lanes of the global index."""

    base: int
    """Index of the first element in the buffer."""
    rows: int
    width: int
    pitch: int
    """Elements of the buffer from one row to the next."""
    lane: int
    """Lane of the first element."""
    lane_pitch: int
    """Lanes from one row to the next."""


class Tiles(NamedTuple):
    """Tiles, checked once on the host and kept on the device of the words. N tiles, C chunks."""

    bits: int
    """Of an element: 8, 16 or 32."""
    end: int
    """Elements that the buffer must have."""
    align: int
    """Every tile of a contiguous tiling starts and ends at a multiple of this many elements."""
    is_contiguous: bool
    """True if every tile is one row."""
    base: Tensor
    """int64 [N]"""
    elements: Tensor
    """int32 [N]"""
    width: Tensor
    """int32 [N], at least 1"""
    pitch: Tensor
    """int64 [N]"""
    lane: Tensor
    """int64 [N]"""
    lane_pitch: Tensor
    """int64 [N]"""
    first_chunk: Tensor
    """int64 [N + 1]: chunks [first_chunk[t], first_chunk[t + 1]) are tile t's."""
    chunk_tile: Tensor
    """int32 [C]: tile of each chunk."""


def contiguous_tiles(
    bounds: Sequence[int] | Tensor, *, bits: int, first_lane: int = 0, device: str | torch.device
) -> Tiles:
    """Tile t is elements [bounds[t], bounds[t + 1]) of a tensor whose element 0 has `first_lane`.

    Args:
        bounds: element starts, and the end; never falling. [N + 1]
        bits: of an element: 8, 16 or 32.
        first_lane: of the buffer's element 0.
        device: where the words are.

    Raises:
        ValueError: bounds fall, are negative, or lie further apart than a tile is large.
    """
    marks = _column(bounds, "bounds")
    if marks.size == 0:
        raise ValueError("bounds is empty: it holds each tile's start, and the end")
    sizes = np.diff(marks)
    lane = first_lane + marks[:-1] * lanes_per_element(bits)
    ones = np.maximum(sizes, 1)
    rectangles = np.stack([marks[:-1], ones * 0 + 1, sizes, ones, lane, ones * 0], axis=1)
    return _tiles(rectangles, bits=bits, device=device)


def rectangle_tiles(
    rectangles: Sequence[Rectangle], *, bits: int, device: str | torch.device
) -> Tiles:
    """Tiles that need not be contiguous; no element may lie in two of them.

    Raises:
        ValueError: a rectangle is negative somewhere, or larger than a tile.
    """
    table = np.asarray(rectangles, np.int64).reshape(-1, len(Rectangle._fields))
    return _tiles(table, bits=bits, device=device)


def even_bounds(elements: int) -> Tensor:
    """Bounds (int64) of the fewest tiles that cover this many elements."""
    return torch.tensor([*range(0, elements, TILE_ELEMENTS), elements])


def _tiles(table: Column, *, bits: int, device: str | torch.device) -> Tiles:
    """Check and lay out one row per tile, in the order of Rectangle's fields.

    Raises:
        ValueError: `bits` is not an element's, or no buffer can hold a tile.
    """
    if bits not in {8, 16, 32}:
        raise ValueError(f"bits is {bits}: an element has 8, 16 or 32")
    base, rows, width, pitch, lane, lane_pitch = (np.ascontiguousarray(c) for c in table.T)
    _check(table, rows * width)
    elements = rows * width
    ends = np.where(elements > 0, base + (rows - 1) * pitch + width, 0)
    chunks = -(-elements // CHUNK)
    first_chunk = np.concatenate([np.zeros(1, np.int64), np.cumsum(chunks)])
    is_contiguous = bool(np.all(rows <= 1))
    align = math.gcd(MAX_ALIGN, *np.unique(base % MAX_ALIGN), *np.unique(elements % MAX_ALIGN))

    def to_device(column: Column, dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(column).to(device=device, dtype=dtype)

    return Tiles(
        bits=bits,
        end=int(ends.max(initial=0)),
        align=align,
        is_contiguous=is_contiguous,
        base=to_device(base, torch.int64),
        elements=to_device(elements, torch.int32),
        width=to_device(np.maximum(width, 1), torch.int32),
        pitch=to_device(pitch, torch.int64),
        lane=to_device(lane, torch.int64),
        lane_pitch=to_device(lane_pitch, torch.int64),
        first_chunk=to_device(first_chunk, torch.int64),
        chunk_tile=to_device(np.repeat(np.arange(len(base)), chunks), torch.int32),
    )


def _check(table: Column, elements: Column) -> None:
    """Refuse tiles that no buffer can hold.

    Raises:
        ValueError: names the first such tile by its number.
    """
    for number in np.flatnonzero((table < 0).any(axis=1))[:1]:
        raise ValueError(
            f"tile {number} has a negative field: {Rectangle(*table[number].tolist())}"
        )
    _, rows, width, pitch, _, _ = table.T
    for number in np.flatnonzero((width > TILE_ELEMENTS) | (elements > TILE_ELEMENTS))[:1]:
        raise ValueError(f"tile {number} has {elements[number]} elements, above {TILE_ELEMENTS}")
    for number in np.flatnonzero((rows > 1) & (pitch < width))[:1]:
        raise ValueError(f"tile {number} has rows of {width[number]}, {pitch[number]} apart")


def _column(values: Sequence[int] | Tensor, name: str) -> Column:
    """One dimension of 64-bit integers.

    Raises:
        ValueError: it is something else.
    """
    column = np.asarray(values.cpu() if isinstance(values, Tensor) else values)
    if column.ndim != 1 or (column.size and column.dtype != np.int64):
        raise ValueError(f"{name} is {column.dtype} {column.shape}: one dimension of int64")
    if np.any(np.diff(column) < 0) or np.any(column < 0):
        raise ValueError(f"{name} must not fall nor be negative")
    return cast("Column", column.astype(np.int64))
