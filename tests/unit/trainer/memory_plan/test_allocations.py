"""Allocations that are counted by hand."""

import torch
from torch._subclasses import FakeTensorMode

from etude.trainer.memory_plan.allocations import Allocations, Kind

KIB = 1 << 10


def test_the_peak_is_the_largest_sum_of_storages_that_live_together() -> None:
    with Allocations() as allocations:
        first = torch.zeros(KIB, dtype=torch.uint8)
        second = first + first
        del first
        third = second.new_zeros(3 * KIB)
        view = third[: 2 * KIB].view(torch.int32)
        del third
        del second, view
        torch.zeros(2 * KIB, dtype=torch.uint8)
    peak = allocations.peak()
    assert peak.num_bytes == 4 * KIB
    assert sum(peak.by_kind.values()) == peak.num_bytes


def test_tensors_without_values_count_as_those_with_them() -> None:
    peaks = []
    for mode in (torch.no_grad(), FakeTensorMode()):
        with mode, Allocations() as allocations:
            left = torch.zeros(64, 32)
            right = torch.zeros(32, 16)
            del left, right
            torch.zeros(64, 32) @ torch.zeros(32, 16)
        peaks.append(allocations.peak().num_bytes)
    assert peaks[0] == peaks[1] == 4 * (64 * 32 + 32 * 16 + 64 * 16)


def test_kinds_are_told_apart_and_one_can_lie_elsewhere() -> None:
    weight = torch.zeros(KIB, dtype=torch.uint8)
    with Allocations() as allocations:
        allocations.assign(Kind.WEIGHTS, [weight, weight[:10]])
        kept = torch.zeros(2 * KIB, dtype=torch.uint8)
        allocations.assign_live(Kind.ACTIVATIONS)
        moment = torch.zeros(5 * KIB, dtype=torch.uint8)
        allocations.assign(Kind.MOMENTS, [moment])
        del kept
    assert allocations.peak().by_kind == {
        Kind.WEIGHTS: KIB,
        Kind.GRADIENTS: 0,
        Kind.MOMENTS: 5 * KIB,
        Kind.GATHERED: 0,
        Kind.ACTIVATIONS: 2 * KIB,
        Kind.TEMPORARIES: 0,
        Kind.CHECKPOINT: 0,
    }
    assert allocations.peak(without={Kind.MOMENTS}).num_bytes == 3 * KIB


def test_a_storage_that_is_resized_counts_with_its_size_at_each_moment() -> None:
    resize = torch.UntypedStorage.resize_
    with Allocations() as allocations:
        gathered = torch.zeros(KIB, dtype=torch.uint8)
        gathered.untyped_storage().resize_(0)
        other = torch.zeros(3 * KIB, dtype=torch.uint8)
        del other
        gathered.untyped_storage().resize_(2 * KIB)
    assert allocations.peak().num_bytes == 3 * KIB
    assert torch.UntypedStorage.resize_ is resize
