"""The watch over interpreted Triton bodies sees what the interpreter lets pass."""

import pytest
import torch

from etude.kernels import dispatch

if not dispatch.INTERPRETED:
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

import triton
import triton.language as tl


@triton.jit
def copy_too_far(source: tl.tensor, target: tl.tensor, size: tl.constexpr) -> None:
    places = tl.arange(0, size)
    tl.store(target + places, tl.load(source + places))


@triton.jit
def all_to_the_first(target: tl.tensor) -> None:
    tl.store(target, tl.program_id(0))


@triton.jit
def read_the_neighbour(target: tl.tensor) -> None:
    program = tl.program_id(0)
    tl.store(target + program, tl.load(target + program + 1))


def test_a_load_beyond_an_argument_is_seen() -> None:
    with pytest.raises(Exception, match="out of bounds"):
        copy_too_far[(1,)](torch.zeros(7), torch.zeros(8), size=8)


def test_a_store_beyond_an_argument_is_seen() -> None:
    with pytest.raises(Exception, match="out of bounds"):
        copy_too_far[(1,)](torch.zeros(8), torch.zeros(7), size=8)


def test_two_programs_at_one_address_are_seen() -> None:
    with pytest.raises(AssertionError, match="two programs"):
        all_to_the_first[(2,)](torch.zeros(1, dtype=torch.int32))
    with pytest.raises(AssertionError, match="another one stores"):
        read_the_neighbour[(3,)](torch.zeros(4))


def test_a_clean_body_passes() -> None:
    target = torch.zeros(8)
    copy_too_far[(1,)](torch.arange(8.0), target, size=8)
    assert target.tolist() == list(range(8))


def test_fresh_memory_is_poisoned() -> None:
    assert torch.empty(3, dtype=torch.int32).tolist() != [0, 0, 0]
