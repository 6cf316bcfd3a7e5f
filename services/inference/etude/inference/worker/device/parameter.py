"""A parameter on a device as words: its tiles, gathered and scanned."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from etude.common.weights.replicas.region_kernels import RegionWindow
from etude.common.weights.replicas.regions import HeldRegion
from etude.common.weights.tensors.digest import ZERO, Digest
from etude.common.weights.tensors.jit import compiled
from etude.common.weights.tensors.words import Words
from etude.kernels.digest import digest_lanes, digest_scan
from etude.kernels.digest_reference import element_sums
from etude.kernels.raw_words import lanes_per_element, raw_words, signed, widen
from etude.kernels.tiles import TILE_ELEMENTS, Rectangle, rectangle_tiles

Integers = npt.NDArray[np.int64]

_PIECE = 1 << 24
"""Elements of a strided region that are digested at a time: 8 bytes each, a few times over."""


class DeviceParameter:
    """One parameter."""

    def __init__(self, flat: Tensor, windows: Sequence[tuple[RegionWindow, int]]) -> None:
        """Cut the regions of a parameter into tiles.

        Args:
            flat: the parameter's elements, contiguous. [n]
            windows: its regions, and the first lane of the tensor that each is of.
        """
        self.is_wide = flat.itemsize == 8
        # Words of 64 bits have no kernels: as numbers for torch, as halves for the digest.
        self.raw = (
            flat.detach().view(torch.int64) if self.is_wide else raw_words(flat, name="parameter")
        )
        self.first_tiles: list[int] = []
        rectangles: list[Rectangle] = []
        for window, first_lane in () if self.is_wide else windows:
            self.first_tiles.append(len(rectangles))
            rectangles += _rectangles(window, first_lane, lanes_per_element(8 * flat.itemsize))
        bits = 32 if self.is_wide else 8 * flat.itemsize
        self.num_tiles = len(rectangles)
        self.tiles = rectangle_tiles(rectangles, bits=bits, device=flat.device)

    def keys(self, flats: Integers, window: RegionWindow, first_tile: int) -> Integers:
        """Sort key of each element: its tile and its index in the tile.  [k]."""
        keys = np.empty(flats.size, np.int64)
        _keys(flats, window, first_tile, keys)
        return keys

    def gather(self, at: Integers) -> Tensor:
        """The words at some positions, as signed integers.  [k] -> [k]."""
        return self._numbers()[torch.from_numpy(at).to(self.raw.device)]

    def _numbers(self) -> Tensor:
        return self.raw if self.is_wide else signed(self.raw)

    def scan(self, sums: "DigestSums", holding: HeldRegion, first_lane: int) -> None:
        """Add the digest of the counted elements of a region."""
        window = holding.window
        raw = self._numbers()
        if self.is_wide:
            raw, window = raw.view(torch.int32), _half_word_window(window)
        if window.rows == 1 and not holding.others.shape[0]:
            part = raw[window.parameter_offset : window.parameter_offset + window.width]
            lanes = lanes_per_element(8 * raw.itemsize)
            lane = first_lane + window.source_offset * lanes
            sums.add_lanes(digest_scan(part, first_lane=lane))
            return
        others = holding.others * (np.array([2, 2, 1, 2, 2, 2]) if self.is_wide else 1)
        band = max(1, _PIECE // window.width)
        for row in range(0, window.rows, band):
            sums.add_lanes(_digest_rows(raw, window, row, band, others, first_lane))


def _half_word_window(window: RegionWindow) -> RegionWindow:
    """The same place in words half as wide."""
    return RegionWindow(*(2 * n for n in window))._replace(rows=window.rows)


def _digest_rows(
    raw: Tensor, window: RegionWindow, row: int, band: int, others: Integers, first_lane: int
) -> Tensor:
    """Digest of some rows of a region, element by element.  [2]."""
    rows = min(band, window.rows - row)
    start = window.parameter_offset + row * window.parameter_stride
    part = torch.as_strided(
        raw, (rows, window.width), (window.parameter_stride, 1), raw.storage_offset() + start
    )
    down = torch.arange(row, row + rows, device=raw.device)[:, None]
    along = torch.arange(window.width, device=raw.device)
    flats = (window.source_offset + down * window.source_stride + along).flatten()
    numbers = widen(part.contiguous()).flatten()
    for other in others.tolist():
        place = flats - other[1]
        line = place.div(other[5], rounding_mode="floor")
        counts = (place < 0) | (line >= other[2]) | (place - line * other[5] >= other[3])
        flats, numbers = flats[counts], numbers[counts]
    lanes = lanes_per_element(8 * raw.itemsize)
    return element_sums(numbers, first_lane + flats * lanes, lanes=lanes)


def _rectangles(window: RegionWindow, first_lane: int, lanes: int) -> list[Rectangle]:
    """Tiles of a region, in the order of their elements."""

    def tile(row: int, rows: int, column: int, width: int) -> Rectangle:
        flat = window.source_offset + row * window.source_stride + column
        return Rectangle(
            base=window.parameter_offset + row * window.parameter_stride + column,
            rows=rows,
            width=width,
            pitch=window.parameter_stride,
            lane=first_lane + flat * lanes,
            lane_pitch=window.source_stride * lanes,
        )

    if window.width > TILE_ELEMENTS:
        starts = range(0, window.width, TILE_ELEMENTS)
        return [
            tile(row, 1, column, min(TILE_ELEMENTS, window.width - column))
            for row in range(window.rows)
            for column in starts
        ]
    band = TILE_ELEMENTS // window.width
    return [
        tile(row, min(band, window.rows - row), 0, window.width)
        for row in range(0, window.rows, band)
    ]


@compiled
def _keys(flats: Integers, window: RegionWindow, first_tile: int, keys: Integers) -> None:
    band = max(1, TILE_ELEMENTS // window.width)
    pieces = -(-window.width // TILE_ELEMENTS)
    start = np.int64(0)
    stop = np.int64(-1)
    first = np.int64(0)
    for i in range(flats.size):
        at = flats[i] - window.source_offset
        if at >= stop or at < start:
            row = at // window.source_stride
            start = row * window.source_stride
            stop = start + window.source_stride
            first = (first_tile + row // band * pieces) * TILE_ELEMENTS
            first += row % band * window.width
        # A row wider than a tile begins one: its columns count through its pieces.
        keys[i] = first + at - start


def split_keys(
    keys: Integers, num_tiles: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Number of changes per tile, and the index of each inside its tile.  [N], [k]."""
    counts = np.bincount(keys // TILE_ELEMENTS, minlength=num_tiles).astype(np.int32)
    return counts, (keys % TILE_ELEMENTS).astype(np.int32)


def to_host_words(numbers: Tensor, like: Words) -> Words:
    """Signed integers on a device as words in host memory."""
    return numbers.cpu().numpy().view(like.dtype)


class DigestSums:
    """Digests and counts of many launches, read from the device once."""

    def __init__(self) -> None:
        self._lanes: list[Tensor] = []
        self._counts: list[Tensor] = []
        self._digest = ZERO
        self._changed = 0

    def add_lanes(self, lanes: Tensor) -> None:
        """Add a digest that is on the device.  [2]."""
        self._lanes.append(lanes)

    def add(self, lanes: Tensor, changed: Tensor) -> None:
        """Add a digest [2] and a count [] that are on the device."""
        self._lanes.append(lanes)
        self._counts.append(changed)

    def add_host(self, found: tuple[int, np.uint64, np.uint64]) -> None:
        """Add a count and a digest that the host computed."""
        count, a, b = found
        self._digest = self._digest.plus(Digest(int(a), int(b)))
        self._changed += int(count)

    def digest(self) -> Digest:
        """Sum of all digests; waits for the device."""
        if not self._lanes:
            return self._digest
        return self._digest.plus(Digest(*digest_lanes(torch.stack(self._lanes).sum(0))))

    def changed(self) -> int:
        """Sum of all counts; waits for the device."""
        if not self._counts:
            return self._changed
        return self._changed + int(torch.stack(self._counts).sum())
