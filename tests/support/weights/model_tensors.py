"""The tensors of a torch model, as a trainer publishes them."""

import numpy as np
import torch

from etude.common.weights.tensors.schema import Schema, TensorSpec, split_of
from etude.common.weights.tensors.words import Words


def schema_of(model: torch.nn.Module) -> Schema:
    """Names and shapes of all float32 parameters."""
    specs = [
        TensorSpec(name=name, dtype="F32", shape=tuple(p.shape), split=split_of(name))
        for name, p in sorted(model.named_parameters())
    ]
    return Schema(grid=8, tensors=tuple(specs))


def words_of(model: torch.nn.Module) -> dict[str, Words]:
    """A copy of all float32 parameters, bit for bit."""
    return {
        name: parameter.detach().numpy().reshape(-1).view(np.uint32).copy()
        for name, parameter in model.named_parameters()
    }
