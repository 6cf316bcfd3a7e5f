"""Shard runs: the elements of a tensor that a rank holds, and their place in its memory.

A run is a range of consecutive row-major elements of the tensor that is consecutive in the shard
too. Placements of any mesh are mapped: Shard on several axes, Replicate, shards of unequal size.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

Positions = npt.NDArray[np.int64]
Interval = tuple[int, int]
"""First index and end."""


class ShardRuns(NamedTuple):
    """Runs of a shard, increasing in the tensor and in the shard."""

    starts: Positions
    """First element of each in the tensor, row-major. [k]"""
    local: Positions
    """First element of each in the shard, row-major. [k]"""
    lengths: Positions
    """In elements. [k]"""

    @property
    def elements(self) -> int:
        """Elements of all runs."""
        return int(self.lengths.sum())


class RunOverlap(NamedTuple):
    """Common elements of two sets of runs: one run at three places."""

    first: Positions
    """Place in the first shard. [k]"""
    second: Positions
    """Place in the second shard. [k]"""
    lengths: Positions
    """[k]"""


def runs_of_shard(tensor: Tensor) -> ShardRuns:
    """Runs of the part of a tensor that is in this rank's memory.

    Raises:
        ValueError: the tensor is a partial sum.
    """
    return runs_of_intervals(tuple(tensor.shape), intervals_of_shard(tensor))


def intervals_of_shard(tensor: Tensor) -> list[list[Interval]]:
    """Indices along each dimension that are in this rank's memory; the shard is their product.

    Raises:
        ValueError: the tensor is a partial sum.
    """
    if not isinstance(tensor, DTensor):
        return [[(0, size)] for size in tensor.shape]
    mesh = tensor.device_mesh
    return placed_intervals(
        tuple(tensor.shape), tensor.placements, tuple(mesh.shape), _coordinate(mesh)
    )


def is_first_replica(tensor: Tensor, *, is_first_rank: bool) -> bool:
    """True if this rank is the one, of all that hold the same shard, that stores or publishes it.

    Args:
        tensor: a tensor without a mesh is held by every rank.
        is_first_rank: True on rank 0.
    """
    if not isinstance(tensor, DTensor):
        return is_first_rank
    replicas = (
        place
        for place, placement in zip(_coordinate(tensor.device_mesh), tensor.placements, strict=True)
        if isinstance(placement, Replicate)
    )
    return not any(replicas)


def owned_runs(tensor: Tensor, *, is_first_rank: bool) -> ShardRuns:
    """Runs of this rank's shard, or none if another rank holds the same ones and is responsible.

    Raises:
        ValueError: the tensor is a partial sum.
    """
    runs = runs_of_shard(tensor)
    return runs if is_first_replica(tensor, is_first_rank=is_first_rank) else NO_RUNS


def placed_intervals(
    shape: Sequence[int],
    placements: Sequence[Placement],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
) -> list[list[Interval]]:
    """Indices along each dimension at a coordinate of a mesh.

    Raises:
        ValueError: the tensor is a partial sum.
    """
    dims: list[list[Interval]] = [[(0, size)] if size else [] for size in shape]
    for placement, size, place in zip(placements, mesh_shape, coordinate, strict=True):
        match placement:
            case Replicate():
                continue
            case _StridedShard():
                dim, factor = placement.dim, int(placement.split_factor)
                pieces = [_chunk(dims[dim], factor, part) for part in range(factor)]
                dims[dim] = _merge([i for piece in pieces for i in _chunk(piece, size, place)])
            case Shard():
                dims[placement.dim] = _chunk(dims[placement.dim], size, place)
            case Partial():
                raise ValueError("a partial sum has no elements of its own")
            case _:
                raise ValueError(f"placement {placement} is not known")
    return dims


def runs_of_intervals(shape: Sequence[int], dims: Sequence[Sequence[Interval]]) -> ShardRuns:
    """Runs of the product of index intervals of each dimension of a tensor."""
    # Dimensions that are held completely at the end of the shape only lengthen the runs.
    inner, last = 1, len(shape) - 1
    while last >= 0 and list(dims[last]) == [(0, shape[last])]:
        inner *= shape[last]
        last -= 1
    if last < 0:
        return ShardRuns(*(np.array([x], np.int64) for x in (0, 0, inner))) if inner else NO_RUNS
    intervals = np.array(dims[last], np.int64).reshape(-1, 2)
    starts, lengths = intervals[:, 0] * inner, (intervals[:, 1] - intervals[:, 0]) * inner
    stride = inner * shape[last]
    for size, held in zip(reversed(shape[:last]), reversed(dims[:last]), strict=True):
        outer = np.concatenate([np.arange(*each, dtype=np.int64) for each in held] or [_EMPTY])
        starts = (outer[:, None] * stride + starts[None]).reshape(-1)
        lengths = np.tile(lengths, outer.size)
        stride *= size
    ends = np.cumsum(lengths)
    return ShardRuns(starts, ends - lengths, lengths)


def intersect_runs(first: ShardRuns, second: ShardRuns) -> RunOverlap:
    """Elements of a tensor that two shards both hold, as runs."""
    if not (first.lengths.size and second.lengths.size):
        return RunOverlap(_EMPTY, _EMPTY, _EMPTY)
    first_ends, second_ends = first.starts + first.lengths, second.starts + second.lengths
    low = np.searchsorted(second_ends, first.starts, side="right")
    high = np.searchsorted(second.starts, first_ends, side="left")
    counts = np.maximum(high - low, 0)
    ours = np.repeat(np.arange(first.starts.size), counts)
    theirs = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + low[ours]
    begins = np.maximum(first.starts[ours], second.starts[theirs])
    ends = np.minimum(first_ends[ours], second_ends[theirs])
    return RunOverlap(
        first.local[ours] + begins - first.starts[ours],
        second.local[theirs] + begins - second.starts[theirs],
        ends - begins,
    )


def _coordinate(mesh: DeviceMesh) -> list[int]:
    return [mesh.get_local_rank(axis) for axis in range(mesh.ndim)]


def _chunk(intervals: Sequence[Interval], count: int, place: int) -> list[Interval]:
    """The part with this number of as many as torch.chunk makes; it may be empty."""
    total = sum(end - start for start, end in intervals)
    size = -(-total // count)
    first, after = min(total, place * size), min(total, (place + 1) * size)
    found, seen = [], 0
    for start, end in intervals:
        low, high = max(start, start + first - seen), min(end, start + after - seen)
        if low < high:
            found.append((low, high))
        seen += end - start
    return found


def _merge(intervals: Sequence[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for start, end in intervals:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged


_EMPTY: Positions = np.empty(0, np.int64)
NO_RUNS = ShardRuns(_EMPTY, _EMPTY, _EMPTY)
