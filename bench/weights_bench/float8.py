"""A bf16 trajectory as quantised serving sees it: fp8 e4m3 with a scale per 128 x 128 block."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from etude.common.weights.tensors.words import Words
from weights_bench.trajectory import Trajectory, gathered, spec

BLOCK = 128
_LARGEST = 448.0
"""Of e4m3."""


class _Quantised(NamedTuple):
    codes: Words
    """One byte per element. [rows * columns]"""
    scales: Words
    """fp32 words, one per block. [blocks]"""
    grid: tuple[int, int]
    """Blocks along each dimension."""


def as_float8(trajectory: Trajectory) -> Trajectory:
    """The matrices of the layers quantised, scales beside them; everything else stays bf16."""
    tensors = {}
    for each, old, new in zip(
        trajectory.schema.tensors, trajectory.old, trajectory.new, strict=True
    ):
        if len(each.shape) != 2 or "layers." not in each.name:
            tensors[each.name] = each, old, new
            continue
        before, after = (_quantised(words, each.shape[0]) for words in (old, new))
        codes = spec(each.name, "F8_E4M3", each.shape)
        scales = spec(f"{each.name}_scale_inv", "F32", before.grid)
        tensors[codes.name] = codes, before.codes, after.codes
        tensors[scales.name] = scales, before.scales, after.scales
    return gathered(f"{trajectory.name} as fp8", tensors, {**trajectory.facts, "block": BLOCK})


def _quantised(words: npt.NDArray[np.unsignedinteger], rows: int) -> _Quantised:
    values = torch.from_numpy(words).view(torch.bfloat16).float().view(rows, -1)
    down, across = (-size % BLOCK for size in values.shape)
    blocks = functional.pad(values, (0, across, 0, down))
    blocks = blocks.view(blocks.shape[0] // BLOCK, BLOCK, -1, BLOCK)
    scales = blocks.abs().amax(dim=(1, 3)).clamp_min(1e-12) / _LARGEST
    codes = _whole(blocks / scales[:, None, :, None])[: values.shape[0], : values.shape[1]]
    return _Quantised(
        codes.to(torch.float8_e4m3fn).contiguous().view(torch.uint8).flatten().numpy(),
        scales.flatten().numpy().view(np.uint32),
        (scales.shape[0], scales.shape[1]),
    )


def _whole(blocks: Tensor) -> Tensor:
    """[r, BLOCK, c, BLOCK] -> [r * BLOCK, c * BLOCK]."""
    return blocks.flatten(0, 1).flatten(1)
