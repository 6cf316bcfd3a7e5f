"""Choice of the kernel body: the reference or Triton."""

import contextlib
import os
from collections.abc import Mapping

import torch
from torch import Tensor

CHOICES = ("", "reference", "triton")


def forced_body(env: Mapping[str, str] = os.environ) -> str:
    """The body that ETUDE_KERNELS forces; empty: Triton for CUDA tensors, else the reference.

    Raises:
        ValueError: ETUDE_KERNELS is not a body.
    """
    chosen = env.get("ETUDE_KERNELS", "")
    if chosen not in CHOICES:
        raise ValueError(f"ETUDE_KERNELS={chosen!r}: it is 'reference', 'triton' or not set")
    return chosen


FORCED = forced_body()
"""Read once: an engine does not change its arithmetic while it runs."""

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""True if Triton bodies run on CPU tensors."""

CHECKED = os.environ.get("ETUDE_KERNELS_CHECK") == "1"
"""True to check values on the device too, which waits for the device."""


def uses_triton(tensor: Tensor) -> bool:
    """True if a Triton body computes on this tensor.

    Raises:
        ValueError: Triton is forced on a CPU tensor and its interpreter is off.
    """
    if FORCED == "reference":
        return False
    if FORCED == "triton" and not (tensor.is_cuda or INTERPRETED):
        raise ValueError("ETUDE_KERNELS=triton on CPU tensors needs TRITON_INTERPRET=1")
    return tensor.is_cuda or FORCED == "triton"


def on_device(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    """Context in which a tensor's GPU is the current one, for Triton's launches."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()
