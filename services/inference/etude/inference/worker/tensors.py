"""Torch tensors and their raw words, sharing memory."""

import numpy as np
import torch

from etude.common.weights.tensors.words import Words, word_type

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
}
"""Torch's formats by their names in a checkpoint."""

NAMES = {dtype: name for name, dtype in DTYPES.items()}


def as_tensor(words: Words, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """The words as elements of a format, in the same memory."""
    return torch.from_numpy(words.view(np.uint8)).view(DTYPES[dtype]).view(shape)


def as_words(tensor: torch.Tensor) -> Words:
    """The tensor's elements as words, in the same memory and in memory's order.

    Raises:
        ValueError: the tensor is on a device, or has holes or overlaps in memory.
    """
    if tensor.device.type != "cpu":
        raise ValueError(f"a tensor on {tensor.device} has no words here")
    return as_flat(tensor).view(torch.uint8).numpy().view(word_type(NAMES[tensor.dtype]))


def as_flat(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's elements in one dimension, in the same memory and in memory's order.

    Raises:
        ValueError: the tensor has holes or overlaps in memory.
    """
    flat = tensor.detach()
    if not flat.is_contiguous():
        # Dense in another order, such as a transposed matrix: its own order is as good.
        flat = flat.permute(*np.argsort([-stride for stride in flat.stride()], kind="stable"))
    if not flat.is_contiguous():
        raise ValueError(f"a tensor with strides {tensor.stride()} has holes in memory")
    return flat.view(-1)
