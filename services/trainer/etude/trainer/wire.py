"""Live tensors as the words that others read."""

from typing import Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from etude.common.weights.tensors.words import Words

Dtype = Literal["Float32", "BFloat16"]

FLOATS = {"Float32": torch.float32, "BFloat16": torch.bfloat16}
NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.uint8: "U8", torch.int64: "I64"}
_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor: all of it, or a shard; it shares the memory."""
    if isinstance(tensor, DTensor):
        shard: Tensor = tensor.to_local()
        return shard
    return tensor


def format_of(tensor: Tensor, *, dtype: Dtype) -> torch.dtype:
    """In which format a tensor travels: floating-point ones in that of the run."""
    return FLOATS[dtype] if tensor.is_floating_point() else tensor.dtype


def bits(tensor: Tensor, *, dtype: torch.dtype, copy: bool = False) -> Tensor:
    """The raw bits of elements in a format, as signed integers on their device, flat. [n].

    A tensor that is in this format already is copied only if asked for.
    """
    flat = tensor.detach().to(dtype, copy=copy).reshape(-1)
    return flat.view(_SIGNED[flat.element_size()])


def num_nonfinite(tensor: Tensor, *, dtype: Dtype) -> int:
    """Elements that are NaN or infinite in the format in which they travel."""
    if not tensor.is_floating_point():
        return 0
    return tensor.numel() - int(torch.isfinite(tensor.to(FLOATS[dtype])).sum())


def words(tensor: Tensor, *, dtype: torch.dtype) -> Words:
    """The raw bits of elements in a format, on the CPU. [n]."""
    return as_words(bits(tensor, dtype=dtype))


def as_words(raw: Tensor) -> Words:
    """What bits() gave, as the unsigned integers of the wire."""
    found: Words = raw.cpu().numpy().view(f"<u{raw.element_size()}")
    return found
