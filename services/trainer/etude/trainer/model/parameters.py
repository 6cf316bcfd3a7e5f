"""Parameters of a policy: names, local shards, gathering, and observation of optimiser steps."""

from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class StepObserver(Protocol):
    """Observer of the weights that a step changes."""

    def wants(self, name: str) -> bool:
        """True if steps of this parameter are to be observed."""
        ...

    def observe_step(self, name: str, parameter: Tensor) -> AbstractContextManager[None]:
        """Context around a step of this parameter alone."""
        ...


def parameters_by_name(module: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters in the order of their names, a tied one once under its first name."""
    return dict(sorted(module.named_parameters()))


def gather_full(tensor: Tensor) -> Tensor:
    """Gather the complete tensor of which this rank may hold a shard; collective."""
    if isinstance(tensor, DTensor):
        full: Tensor = tensor.full_tensor()
        return full
    return tensor


def local_shard(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, all of it or a shard; shares the memory."""
    if isinstance(tensor, DTensor):
        shard: Tensor = tensor.to_local()
        return shard
    return tensor
