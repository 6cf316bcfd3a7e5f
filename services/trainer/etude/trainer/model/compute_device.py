"""Device that computes a step: a GPU, or in a memory plan CPU tensors that stand for one."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_IS_PLANNED_GPU: ContextVar[bool] = ContextVar("is_planned_gpu", default=False)


def is_gpu(device: torch.device) -> bool:
    """True if a step on this device computes as on a GPU: in bf16, by its kernels."""
    return device.type == "cuda" or _IS_PLANNED_GPU.get()


@contextmanager
def plan_gpu() -> Iterator[None]:
    """Let tensors without values on the CPU stand for those of a GPU, inside the block.

    Fake tensors on a GPU need its driver, which the machine that plans a run may lack.
    """
    token = _IS_PLANNED_GPU.set(True)
    try:
        yield
    finally:
        _IS_PLANNED_GPU.reset(token)
