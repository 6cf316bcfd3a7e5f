"""Activation checkpointing: blocks that keep their input alone, and compute the rest again.

transformers' own switch does nothing here: it acts in training mode only, and a policy is always in
evaluation mode, without dropout. A block's forward is replaced, so that FSDP's hooks stay around
it: its parameters are complete when the backward pass computes it again.
"""

import functools
from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import Any

import torch
from torch import nn
from torch.nn.attention import varlen
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from transformers import PreTrainedModel


class Checkpointing(StrEnum):
    """Activations that a block keeps for the backward pass."""

    NONE = "None"
    """All."""
    BLOCKS = "Blocks"
    """None but its input."""
    SELECTIVE = "Selective"
    """Its input and the results of attention, the one part whose cost grows with length squared."""


_ATTENTION = [
    varlen._varlen_attn._opoverload,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_fused_attention_overrideable.default,
]


def blocks(model: PreTrainedModel) -> Iterator[nn.Module]:
    """Blocks of a model, those that FSDP shards one by one."""
    names = set(model._no_split_modules or ())
    for module in model.modules():
        # FSDP2 makes a subclass of each class that it shards, named after it.
        if {type(module).__name__, type(module).__name__.removeprefix("FSDP")} & names:
            yield module


def checkpoint_blocks(model: PreTrainedModel, mode: Checkpointing) -> None:
    """Let the blocks of a model keep less for the backward pass; results are the same bits."""
    if mode == Checkpointing.NONE:
        return
    for block in blocks(model):
        block.forward = functools.partial(_run_block, block.forward, mode)


def _run_block(
    forward: Callable[..., object], mode: Checkpointing, *args: object, **kwargs: object
) -> object:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    extra: dict[str, Any] = {}
    if mode == Checkpointing.SELECTIVE:
        extra["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _ATTENTION)
    # A policy draws no random numbers: there is no state to keep.
    return checkpoint(
        functools.partial(forward, **kwargs),
        *args,
        use_reentrant=False,
        preserve_rng_state=False,
        **extra,
    )


def compile_blocks(model: PreTrainedModel) -> None:
    """Compile each block on its first pass, for lengths that vary."""
    for block in blocks(model):
        block.compile(dynamic=True)
