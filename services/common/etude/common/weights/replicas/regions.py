"""Regions: the elements of the checkpoint's tensors in each parameter of a rank."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from etude.common.weights.replicas.region_kernels import RegionWindow
from etude.common.weights.tensors.schema import Schema, TensorSpec


class Region(NamedTuple):
    """A rectangle of a tensor inside a parameter, both seen as flat row-major words.

    Element (r, c), 0 <= r < rows, 0 <= c < width, is word `parameter_offset + r *
    parameter_stride + c` of the parameter and element `source_offset + r * source_stride + c` of
    the tensor.
    """

    parameter: str
    parameter_offset: int
    source_offset: int
    rows: int
    width: int
    parameter_stride: int
    source_stride: int
    counted: bool = True
    """False where a lower rank of the group holds the same elements: the digest counts once."""

    @property
    def elements(self) -> int:
        return self.rows * self.width

    @property
    def source_stop(self) -> int:
        """Behind its last element in the tensor."""
        return self.source_offset + (self.rows - 1) * self.source_stride + self.width

    @property
    def parameter_stop(self) -> int:
        """Behind its last word in the parameter."""
        return self.parameter_offset + (self.rows - 1) * self.parameter_stride + self.width

    def numbers(self) -> npt.NDArray[np.int64]:
        """Its numbers for compiled loops, in the order of the fields of a window."""
        return np.array(self[1:7], np.int64)


Regions = Mapping[int, Sequence[Region]]
"""By place of the tensor in the schema; a tensor may lie in several parameters, or in none."""


def region_problem(region: Region, spec: TensorSpec, words: int) -> str:
    """Reason for which a region does not fit its tensor or parameter; empty if it does."""
    if min(region[1:7]) < 0 or not region.rows or not region.width:
        return "a region has elements, and no negative number"
    if region.rows > 1 and min(region.parameter_stride, region.source_stride) < region.width:
        return "its rows overlap"
    if region.source_stop > spec.elements:
        return f"it ends at element {region.source_stop} of {spec.elements}"
    if region.parameter_stop > words:
        return f"it ends at word {region.parameter_stop} of {words}"
    return ""


def identity_regions(schema: Schema) -> dict[int, list[Region]]:
    """Every tensor whole, in a parameter of its own name."""
    return {
        place: [_whole_region(spec, counted=True)]
        for place, spec in enumerate(schema.tensors)
        if spec.elements
    }


def slice_regions(schema: Schema, rank: int, ranks: int) -> dict[int, list[Region]]:
    """The slice of one tensor-parallel rank, each tensor in a parameter of its own name.

    Matrices are cut as the schema says where the ranks divide them; vectors and all others are
    whole on every rank, and count on the first.
    """
    found = {}
    for place, spec in enumerate(schema.tensors):
        if spec.elements:
            cut = _cut(spec, rank, ranks)
            found[place] = [_whole_region(spec, counted=rank == 0) if cut is None else cut]
    return found


def _whole_region(spec: TensorSpec, *, counted: bool) -> Region:
    size = spec.elements
    return Region(spec.name, 0, 0, 1, size, size, size, counted)


def _cut(spec: TensorSpec, rank: int, ranks: int) -> Region | None:
    if len(spec.shape) < 2:
        return None
    *stacked, rows, columns = spec.shape
    planes = math.prod(stacked)
    if spec.split == "columns":
        if columns % ranks:
            return None
        width = columns // ranks
        return Region(spec.name, 0, rank * width, planes * rows, width, width, columns)
    if rows % ranks:
        return None
    width = rows // ranks * columns
    return Region(spec.name, 0, rank * width, planes, width, width, rows * columns)


class HeldRegion(NamedTuple):
    """A region of the live words."""

    region: Region
    window: RegionWindow
    others: npt.NDArray[np.int64]
    """Numbers of the regions that count some of its elements before it. [r, 6]"""


def held_regions(regions: Iterable[Region]) -> list[HeldRegion]:
    """The regions of one tensor, each with those before it that count some of its elements."""
    held: list[HeldRegion] = []
    counted: list[Region] = []
    for region in regions:
        before = [other.numbers() for other in counted if _overlap(region, other)]
        others = np.array(before, np.int64).reshape(-1, 6)
        held.append(HeldRegion(region, _window(region), others))
        if region.counted:
            counted.append(region)
    return held


def _overlap(one: Region, other: Region) -> bool:
    """Return true if two regions of a tensor may share elements."""
    return one.source_offset < other.source_stop and other.source_offset < one.source_stop


def _window(region: Region) -> RegionWindow:
    """The region's numbers, as one row where it is one range on both sides."""
    if region.rows == 1 or region.width == region.parameter_stride == region.source_stride:
        size = region.elements
        return RegionWindow(region.parameter_offset, region.source_offset, 1, size, size, size)
    return RegionWindow(*region[1:7])
