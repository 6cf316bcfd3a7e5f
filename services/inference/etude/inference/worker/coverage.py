"""Assignment of digest elements to ranks: each element is counted by exactly one rank."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from etude.common.errors import CorruptError
from etude.common.weights.replicas.regions import Region, Regions
from etude.common.weights.tensors.jit import compiled
from etude.common.weights.tensors.schema import Schema, TensorSpec

Numbers = npt.NDArray[np.int64]
Marks = npt.NDArray[np.bool_]


class ComputedParameterError(CorruptError):
    """A weight map does not cover the model: its loader computed some parameters."""


def region_rows(regions: Regions) -> Numbers:
    """A rank's regions as numbers: index of the tensor, then Region.numbers().  [n, 7]."""
    found = [(tensor, *region[1:7]) for tensor in sorted(regions) for region in regions[tensor]]
    return np.array(found, np.int64).reshape(-1, 7)


def encode_regions(regions: Regions) -> bytes:
    """A rank's regions as bytes, to send to another process."""
    return region_rows(regions).astype("<i8").tobytes()


def decode_regions(data: bytes) -> Numbers:
    """The rows that encode_regions() wrote, as region_rows() gives them.  [n, 7]."""
    return np.frombuffer(data, "<i8").reshape(-1, 7)


def unite_regions(schema: Schema, ranks: Sequence[Numbers]) -> dict[int, list[Region]]:
    """Union of the regions of all ranks, without their parameters; each region once."""
    found: dict[int, list[Region]] = {}
    for row in np.unique(np.concatenate(ranks), axis=0).tolist():
        found.setdefault(row[0], []).append(Region(schema.tensors[row[0]].name, *row[1:]))
    return found


def mark_counted(regions: Regions, flags: bytes) -> dict[int, list[Region]]:
    """The same regions with their `counted` flags from assign_counted()."""
    flag = iter(flags)
    return {
        tensor: [region._replace(counted=bool(next(flag))) for region in regions[tensor]]
        for tensor in sorted(regions)
    }


def assign_counted(schema: Schema, ranks: Sequence[Numbers]) -> list[bytes]:
    """Flags of the regions that each rank counts: those that no lower rank holds.

    Args:
        schema: of the policy.
        ranks: region_rows() of each.

    Returns:
        One byte for each row of each rank: 1 where the rank counts the region.

    Raises:
        ComputedParameterError: an element of the checkpoint lies on no rank.
        CorruptError: a region that a lower rank holds in part: elements would count twice, or
            not at all.
    """
    flags = [np.zeros(len(held), np.uint8) for held in ranks]
    for tensor, spec in enumerate(schema.tensors):
        held = np.zeros(spec.elements, np.bool_)
        for rank, found in enumerate(ranks):
            here = np.flatnonzero(found[:, 0] == tensor)
            for row in here:
                flags[rank][row] = _is_first_holder(held, found[row], spec, rank)
            for row in here:
                _mark(held, found[row])
        if not held.all():
            raise ComputedParameterError(
                f"the model does not take all elements of tensor {spec.name!r} as they are"
            )
    return [flag.tobytes() for flag in flags]


def _is_first_holder(held: Marks, row: Numbers, spec: TensorSpec, rank: int) -> bool:
    known = _num_marked(held, row)
    elements = int(row[3] * row[4])
    if 0 < known < elements:
        raise CorruptError(
            f"tensor {spec.name!r}: rank {rank} holds {elements} elements in one piece, {known} "
            "of which lie on lower ranks as well: they could not be counted once"
        )
    return known == 0


@compiled
def _num_marked(held: Marks, row: Numbers) -> int:
    """Number of marked elements in a region."""
    known = 0
    for line in range(row[3]):
        start = row[2] + line * row[6]
        for at in range(start, start + row[4]):
            known += held[at]
    return known


@compiled
def _mark(held: Marks, row: Numbers) -> None:
    for line in range(row[3]):
        start = row[2] + line * row[6]
        held[start : start + row[4]] = True
