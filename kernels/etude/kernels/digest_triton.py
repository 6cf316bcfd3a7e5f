"""Triton bodies of the state digest."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from etude.kernels import digest_reference
from etude.kernels.dispatch import on_device
from etude.kernels.raw_words import lanes_per_element

BLOCK = 1024
BLOCKS = 32
"""Blocks of one program: few partial sums, still thousands of programs for a model."""

SEED_A = tl.constexpr(digest_reference.SEEDS[0])
SEED_B = tl.constexpr(digest_reference.SEEDS[1])
LANE_FACTOR = tl.constexpr(digest_reference.LANE_FACTOR)
WORD_FACTOR = tl.constexpr(digest_reference.WORD_FACTOR)
FIRST_MULTIPLIER = tl.constexpr(digest_reference.MULTIPLIERS[0])
SECOND_MULTIPLIER = tl.constexpr(digest_reference.MULTIPLIERS[1])


@triton.jit
def mix(lane: tl.tensor, word: tl.tensor, SEED: tl.constexpr) -> tl.tensor:
    """Mix of one lane, in uint64."""
    z = lane * LANE_FACTOR + word * WORD_FACTOR + SEED
    z = (z ^ (z >> 30)) * FIRST_MULTIPLIER
    z = (z ^ (z >> 27)) * SECOND_MULTIPLIER
    return z ^ (z >> 31)


@triton.jit
def element_mix(
    numbers: tl.tensor, lane: tl.tensor, SEED: tl.constexpr, LANES: tl.constexpr
) -> tl.tensor:
    """Mix of whole elements: the sum over their lanes, low 16 bits first, in uint64."""
    number = numbers.to(tl.uint64)
    first = lane.to(tl.uint64)
    total = mix(first, number & 0xFFFF, SEED)
    if LANES == 2:
        total += mix(first + 1, number >> 16, SEED)
    return total


@triton.jit
def _scan(
    raw: tl.tensor,
    partial: tl.tensor,
    n: tl.int64,
    first_lane: tl.int64,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    start = program.to(tl.int64) * (BLOCK * BLOCKS)
    sum_a = tl.zeros([BLOCK], tl.uint64)
    sum_b = tl.zeros([BLOCK], tl.uint64)
    for block in range(BLOCKS):
        place = start + block * BLOCK + tl.arange(0, BLOCK)
        inside = place < n
        numbers = tl.load(raw + place, mask=inside, other=0)
        lane = first_lane + place * LANES
        sum_a += tl.where(inside, element_mix(numbers, lane, SEED_A, LANES), 0)
        sum_b += tl.where(inside, element_mix(numbers, lane, SEED_B, LANES), 0)
    tl.store(partial + 2 * program, tl.sum(sum_a, 0).to(tl.int64))
    tl.store(partial + 2 * program + 1, tl.sum(sum_b, 0).to(tl.int64))


def digest_scan(raw: Tensor, *, first_lane: int) -> Tensor:
    """Digest of contiguous words.  [n] -> [2]."""
    programs = triton.cdiv(raw.numel(), BLOCK * BLOCKS)
    partial = torch.empty(programs, 2, dtype=torch.int64, device=raw.device)
    if programs:
        with on_device(raw):
            _scan[(programs,)](
                raw,
                partial,
                raw.numel(),
                first_lane,
                LANES=lanes_per_element(8 * raw.itemsize),
                BLOCK=BLOCK,
                BLOCKS=BLOCKS,
            )
    return partial.sum(0)
