"""Context parallel attention: ranks that hold parts of a row exchange tokens for heads.

Each rank computes everything but attention for its own tokens. Before attention one all-to-all
gives it all tokens of a share of the heads, and after attention a second one gives it its own
tokens of all heads. Source: DeepSpeed-Ulysses, https://arxiv.org/abs/2309.14509.

Shapes: T tokens of a packed row, C ranks that share it, A query heads, K key heads, D and E sizes
of a key and of a value.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx
from transformers import PretrainedConfig
from typing_extensions import override

_BY_LENGTH = {"dynamic", "longrope"}
"""Types of RoPE whose frequencies follow from the largest position that a rank sees."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextGroup:
    """This rank among those that share the tokens of each row."""

    rank: int = 0
    size: int = 1
    process_group: dist.ProcessGroup | None = None
    """None for a single rank."""

    def padding(self, length: int) -> int:
        """Number of tokens that a row lacks for equal parts."""
        return -length % self.size

    def own_tokens(self, length: int) -> slice:
        """This rank's part of a row of length tokens, a multiple of the size."""
        part = length // self.size
        return slice(self.rank * part, (self.rank + 1) * part)


UNDIVIDED = ContextGroup()
"""One rank with whole rows."""


class HeadShare(NamedTuple):
    """Inputs of attention over all tokens for a share of the heads."""

    query: Tensor
    """[T, A / C, D]"""
    key: Tensor
    """[T, lcm(K, C) / C, D]"""
    value: Tensor
    """[T, lcm(K, C) / C, E]"""


def check_context(config: PretrainedConfig, size: int) -> None:
    """Check that ranks can share the tokens of a row.

    Args:
        config: of the model.
        size: number of ranks that share a row.

    Raises:
        ValueError: they cannot.
    """
    text = config.get_text_config()
    if text.num_attention_heads % size:
        raise ValueError(
            f"{text.num_attention_heads} attention heads cannot be shared by {size} ranks evenly"
        )
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = [part.get("rope_type") for part in (rope, *rope.values()) if isinstance(part, dict)]
    for kind in kinds:
        if kind in _BY_LENGTH:
            raise ValueError(
                f"RoPE of type {kind} depends on the length of the row, of which each rank has a"
                " part"
            )


def exchange_tokens_for_heads(
    query: Tensor, key: Tensor, value: Tensor, *, group: ContextGroup
) -> HeadShare:
    """Give each rank all tokens of its share of the heads, in one all-to-all.

    Key heads that the ranks cannot share evenly are repeated lcm(K, C) / K times, which costs as
    much more of their memory and traffic.

    Args:
        query: of this rank's tokens. [T / C, A, D]
        key: [T / C, K, D]
        value: [T / C, K, E]
        group: ranks that share the row.
    """
    if group.size == 1:
        return HeadShare(query, key, value)
    repeats = math.lcm(key.shape[1], group.size) // key.shape[1]
    if repeats > 1:
        key, value = (part.repeat_interleave(repeats, dim=1) for part in (key, value))
    heads = [
        part.reshape(len(part), group.size, -1, part.shape[-1]) for part in (query, key, value)
    ]
    # [C, T / C, …]: first the rank that gets it. Received: first the rank whose tokens they are.
    sent = torch.cat([part.flatten(2) for part in heads], dim=2).transpose(0, 1)
    received = _all_to_all(sent, group).flatten(0, 1)
    parts = torch.split(received, [part[0, 0].numel() for part in heads], dim=1)
    shapes = [part.shape[2:] for part in heads]
    return HeadShare(*(part.reshape(-1, *shape) for part, shape in zip(parts, shapes, strict=True)))


def exchange_heads_for_tokens(attended: Tensor, *, group: ContextGroup) -> Tensor:
    """Give each rank all heads of its tokens, in one all-to-all. [T, A / C, E] -> [T / C, A, E]."""
    if group.size == 1:
        return attended
    received = _all_to_all(attended.reshape(group.size, -1, *attended.shape[1:]), group)
    return received.transpose(0, 1).flatten(1, 2)


def _all_to_all(parts: Tensor, group: ContextGroup) -> Tensor:
    """Send part c to rank c of the group, and order those received by sender. [C, …]."""
    received: Tensor = _AllToAll.apply(parts, group)  # type: ignore[no-untyped-call]
    return received


class _AllToAll(torch.autograd.Function):
    """All-to-all of equal parts, which is its own transpose: gradients go back the same way."""

    @staticmethod
    @override
    def forward(ctx: FunctionCtx, parts: Tensor, group: ContextGroup) -> Tensor:
        ctx.group = group  # type: ignore[attr-defined]
        return _exchange(parts, group)

    @staticmethod
    @override
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None]:
        return _exchange(gradients[0], ctx.group), None  # type: ignore[attr-defined]


def _exchange(parts: Tensor, group: ContextGroup) -> Tensor:
    parts = parts.contiguous()
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group.process_group)
    return received
