"""The regions of a tensor on one rank, as compiled loops need them."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from etude.common.weights.replicas.placing import Window
from etude.common.weights.replicas.regions import Region


class Holding(NamedTuple):
    """A region of the live words."""

    region: Region
    window: Window
    others: npt.NDArray[np.int64]
    """Numbers of the regions that count some of its elements before it. [r, 6]"""


def holdings(regions: Iterable[Region]) -> list[Holding]:
    """The regions of one tensor, each with those before it that count some of its elements."""
    held: list[Holding] = []
    counted: list[Region] = []
    for region in regions:
        before = [other.numbers() for other in counted if _meet(region, other)]
        others = np.array(before, np.int64).reshape(-1, 6)
        held.append(Holding(region, _window(region), others))
        if region.counted:
            counted.append(region)
    return held


def _meet(one: Region, other: Region) -> bool:
    """Return true if two regions of a tensor may share elements."""
    return one.source_offset < other.source_stop and other.source_offset < one.source_stop


def _window(region: Region) -> Window:
    """The region's numbers, as one row where it is one range on both sides."""
    if region.rows == 1 or region.width == region.parameter_stride == region.source_stride:
        size = region.elements
        return Window(region.parameter_offset, region.source_offset, 1, size, size, size)
    return Window(*region[1:7])
