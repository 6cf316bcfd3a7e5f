"""A rank finds its elements under any placement, as torch distributes tensors."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from etude.trainer.model.shard_runs import (
    ShardRuns,
    intersect_runs,
    owned_runs,
    runs_of_intervals,
    runs_of_shard,
)


@contextmanager
def rank_of(rank: int, size: int) -> Iterator[None]:
    """This process as one rank of a group without peers."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def distributed(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], placements: list[Placement]
) -> DTensor:
    mesh = init_device_mesh("cpu", mesh_shape)
    numbers = torch.arange(int(np.prod(shape)), dtype=torch.int64).reshape(shape)
    return distribute_tensor(numbers, mesh, placements, src_data_rank=None)


def elements(runs: ShardRuns) -> list[int]:
    """Positions in the tensor, in the order of the shard."""
    assert (np.cumsum(runs.lengths) - runs.lengths).tolist() == runs.local.tolist()
    return [
        place
        for start, length in zip(runs.starts.tolist(), runs.lengths.tolist(), strict=True)
        for place in range(start, start + length)
    ]


@st.composite
def layouts(
    draw: st.DrawFn,
) -> tuple[tuple[int, ...], tuple[int, ...], list[Placement]]:
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    mesh = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    placements: list[Placement] = [
        draw(st.sampled_from([Replicate(), *(Shard(dim) for dim in range(len(shape)))]))
        for _ in mesh
    ]
    return shape, mesh, placements


@settings(max_examples=40)
@given(layout=layouts())
def test_runs_are_the_elements_that_torch_gives_a_rank_and_owners_hold_each_once(
    layout: tuple[tuple[int, ...], tuple[int, ...], list[Placement]],
) -> None:
    shape, mesh, placements = layout
    size = int(np.prod(mesh))
    owned: list[int] = []
    for rank in range(size):
        with rank_of(rank, size):
            tensor = distributed(shape, mesh, placements)
            assert elements(runs_of_shard(tensor)) == tensor.to_local().flatten().tolist()
            owned += elements(owned_runs(tensor, is_first_rank=rank == 0))
    assert sorted(owned) == list(range(int(np.prod(shape))))


@settings(max_examples=20)
@given(rows=st.integers(1, 13), columns=st.integers(1, 4), dim=st.integers(0, 1))
def test_rows_that_are_sharded_from_right_to_left_are_found(
    rows: int, columns: int, dim: int
) -> None:
    placements: list[Placement] = [_StridedShard(0, split_factor=3), Shard(dim)]
    for rank in range(6):
        with rank_of(rank, 6):
            tensor = distributed((rows, columns), (2, 3), placements)
            assert elements(runs_of_shard(tensor)) == tensor.to_local().flatten().tolist()


def test_a_tensor_without_a_mesh_belongs_to_the_first_rank() -> None:
    tensor = torch.zeros(3, 4)
    assert elements(owned_runs(tensor, is_first_rank=True)) == list(range(12))
    assert owned_runs(tensor, is_first_rank=False).elements == 0


intervals = st.lists(st.integers(0, 6), max_size=6, unique=True).map(
    lambda cuts: list(zip(*[iter(sorted(cuts))] * 2, strict=False))
)


@given(first=st.tuples(intervals, intervals), second=st.tuples(intervals, intervals))
def test_common_elements_of_two_shards_lie_where_both_have_them(
    first: tuple[list[tuple[int, int]], ...], second: tuple[list[tuple[int, int]], ...]
) -> None:
    ours, theirs = (runs_of_intervals((6, 6), each) for each in (first, second))
    overlap = intersect_runs(ours, theirs)
    own, other = elements(ours), elements(theirs)
    pairs = [
        (own[a + i], other[b + i])
        for a, b, n in zip(*(each.tolist() for each in overlap), strict=True)
        for i in range(n)
    ]
    assert all(a == b for a, b in pairs)
    assert sorted(a for a, _ in pairs) == sorted(set(own) & set(other))
