"""Raw bits of live tensors, in the number format that versions are published in."""

from typing import Literal

import torch
from torch import Tensor

from etude.common.weights.tensors.words import Words

Dtype = Literal["Float32", "BFloat16"]

FLOATS = {"Float32": torch.float32, "BFloat16": torch.bfloat16}
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""By the names of safetensors; formats of quantised models need scales that are not known here."""
NAMES = {DTYPES[name]: name for name in ("F32", "BF16", "U8", "I64")}
"""Of the formats that live tensors have."""
_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def wire_dtype(tensor: Tensor, *, dtype: Dtype) -> torch.dtype:
    """The dtype in which a tensor is published: the run's for floating-point tensors."""
    return FLOATS[dtype] if tensor.is_floating_point() else tensor.dtype


def raw_bits(tensor: Tensor, *, dtype: torch.dtype, copy: bool = False) -> Tensor:
    """Raw bits of elements in a dtype, as signed integers on their device, flat. [n].

    A tensor of this dtype is copied only on request.
    """
    flat = tensor.detach().to(dtype, copy=copy).reshape(-1)
    return flat.view(_SIGNED[flat.element_size()])


def count_nonfinite(tensor: Tensor, *, dtype: Dtype) -> int:
    """Count the elements that are NaN or infinite in the published dtype."""
    if not tensor.is_floating_point():
        return 0
    return tensor.numel() - int(torch.isfinite(tensor.to(FLOATS[dtype])).sum())


def to_words(tensor: Tensor, *, dtype: torch.dtype) -> Words:
    """Raw bits of elements in a dtype, as unsigned integers on the CPU. [n]."""
    return bits_to_words(raw_bits(tensor, dtype=dtype))


def bits_to_words(raw: Tensor) -> Words:
    """Copy raw bits to the CPU as unsigned little-endian integers."""
    found: Words = raw.cpu().numpy().view(f"<u{raw.element_size()}")
    return found
