"""Tensors as raw bits: one unsigned word per element, never computed with."""

import enum

import torch
from torch import Tensor

UNSIGNED = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}
"""Word type by the bytes of an element."""

SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32}
"""Signed types of the same width, which every torch operation supports."""


def raw_words(tensor: Tensor, *, name: str) -> Tensor:
    """The elements' raw bits, flat, sharing the tensor's memory.  [...] -> [n].

    Raises:
        ValueError: elements are not 8, 16 or 32 bits wide, or the tensor is not contiguous.
    """
    if tensor.itemsize not in UNSIGNED or tensor.is_complex():
        raise ValueError(f"{name} is {tensor.dtype}: elements are 8, 16 or 32 bits wide")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} is not contiguous: strides {tensor.stride()}")
    return tensor.detach().view(-1).view(UNSIGNED[tensor.itemsize])


def signed(tensor: Tensor) -> Tensor:
    """Words as signed integers of the same bits, sharing their memory."""
    return tensor.view(SIGNED[tensor.itemsize])


def unsigned(tensor: Tensor) -> Tensor:
    """Signed integers back as words, sharing their memory."""
    return tensor.view(UNSIGNED[tensor.itemsize])


def widen(tensor: Tensor) -> Tensor:
    """Words as numbers in int64."""
    return signed(tensor).to(torch.int64) & ((1 << (8 * tensor.itemsize)) - 1)


def lanes_per_element(bits: int) -> int:
    """Number of 16-bit lanes of the state digest that one element takes, at least one."""
    return max(1, bits // 16)


class Axis(enum.Enum):
    """Meaning of a delta's values."""

    ABSOLUTE = 0
    """New raw bits."""
    PLAIN = 1
    """Differences of raw bits, mod 2^w: formats without an order."""
    ORDERED = 2
    """Steps along the ulp axis, mod 2^w: sign-magnitude formats, whose neighbours differ by 1."""
