"""Packed attention: causal attention within each of several sequences that lie in one row.

Registered as an attention implementation of transformers, so that a model's own modules call it.
On GPUs it is one kernel over all sequences; elsewhere one call a sequence, so that no mask of
T * T elements is built.

Shapes: B rows, T their length, A query heads, K key heads, D head size, S sequences.
"""

import itertools
from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AutoModelForCausalLM, PretrainedConfig

from etude.trainer.model import context_parallel
from etude.trainer.model.compute_device import is_gpu
from etude.trainer.model.context_parallel import UNDIVIDED, ContextGroup

IMPLEMENTATION = "etude_packed"
_LAYER_TYPES = {"full_attention", "sliding_attention"}
_UNSUPPORTED = ("s_aux", "position_bias", "cache")
"""Arguments that change the result, and that this implementation does not have."""


class Segments:
    """Sequences that lie in one row, one behind the other.

    No dataclass and no tuple: FSDP copies those when it casts the arguments of a block, and layers
    would be noted in the copies.
    """

    def __init__(
        self,
        lengths: tuple[int, ...],
        *,
        device: torch.device,
        context: ContextGroup = UNDIVIDED,
    ) -> None:
        """Lay sequences one behind the other.

        Args:
            lengths: [S]
            device: of the row.
            context: ranks that share the row.
        """
        ends = (0, *itertools.accumulate(lengths))
        self.lengths = lengths
        self.context = context
        self.bounds = torch.tensor(ends, dtype=torch.int32, device=device)
        """Where each begins, and the end. [S + 1]"""
        self.layers: set[int] = set()
        """Layers that attended by these segments."""

    def positions(self) -> Tensor:
        """Position of each token of this rank in its own sequence. [1, T]."""
        parts = [torch.arange(length, device=self.bounds.device) for length in self.lengths]
        return torch.cat(parts)[None, self.context.own_tokens(sum(self.lengths))]


def check_packing(config: PretrainedConfig) -> None:
    """Check that a model's layers can attend within packed sequences.

    Raises:
        ValueError: they cannot.
    """
    text = config.get_text_config()
    others = sorted({*(getattr(text, "layer_types", None) or ())} - _LAYER_TYPES)
    if others:
        raise ValueError(f"{config.model_type} has layers of type {', '.join(others)}")
    kind = AutoModelForCausalLM._model_mapping[type(config)]
    if not getattr(kind, "_supports_attention_backend", False):
        raise ValueError(f"{kind.__name__} computes attention without transformers' interface")


def attend(  # noqa: PLR0913 - transformers' own signature
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    segments: Segments | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """Attend within each segment; without segments each row is one.

    Args:
        module: the attention module that calls.
        query: of this rank's tokens, as are key and value. [B, A, T, D]
        key: [B, K, T, D]
        value: [B, K, T, D]
        attention_mask: must be None.
        scaling: of the dot products; 1 / sqrt(D) unless given.
        sliding_window: positions that a token sees, its own included; all earlier unless given.
        softcap: bounds the scaled dot products by softcap * tanh(. / softcap).
        segments: of one row.
        others: further arguments of transformers.

    Raises:
        ValueError: an argument has no meaning here.

    Returns:
        [B, T, A, D]
    """
    _check_supported(module, attention_mask, others)
    if segments is None:
        rows, length = query.shape[0], query.shape[2]
        segments = Segments((length,) * rows, device=query.device)
    segments.layers.add(int(getattr(module, "layer_idx", -1)))
    parts = (part.transpose(1, 2).flatten(0, 1) for part in _cast_as_autocast(query, key, value))
    share = context_parallel.exchange_tokens_for_heads(*parts, group=segments.context)
    result = _attend_segments(
        share, segments, scaling=scaling, sliding_window=sliding_window, softcap=softcap
    )
    result = context_parallel.exchange_heads_for_tokens(result, group=segments.context)
    return result.reshape(query.shape[0], query.shape[2], *result.shape[1:]), None


def _check_supported(
    module: nn.Module, attention_mask: Tensor | None, others: Mapping[str, object]
) -> None:
    unsupported = [name for name in _UNSUPPORTED if others.get(name) is not None]
    if unsupported or attention_mask is not None or not getattr(module, "is_causal", True):
        named = ", ".join(unsupported) or "a mask of its own"
        raise ValueError(f"{type(module).__name__} attends with {named}, which packing lacks")


def _cast_as_autocast(*parts: Tensor) -> tuple[Tensor, ...]:
    """Cast as autocast does for torch's own attention; it does not know the packed kernel.

    Rotary embeddings leave queries and keys in fp32 where the embedding of tokens is in fp32, as on
    a single GPU.
    """
    device = parts[0].device.type
    if not torch.is_autocast_enabled(device):
        return parts
    return tuple(part.to(torch.get_autocast_dtype(device)) for part in parts)


def _attend_segments(
    parts: tuple[Tensor, ...],
    segments: Segments,
    *,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
) -> Tensor:
    """Attend within each segment, in one kernel call where there is a kernel; gives [T, A, D]."""
    queries, keys, values = parts
    longest = max(segments.lengths)
    window = sliding_window if sliding_window is not None and sliding_window < longest else None
    if _has_kernel(queries, keys, values, softcap=softcap):
        attended = varlen_attn(
            queries,
            keys,
            values,
            segments.bounds,
            segments.bounds,
            longest,
            longest,
            scale=scaling,
            window_size=(-1 if window is None else window - 1, 0),
            enable_gqa=keys.shape[1] != queries.shape[1],
        )
        return cast("Tensor", attended)  # nothing else was asked for
    split = (torch.split(part, list(segments.lengths)) for part in parts)
    return torch.cat(
        [
            _attend_once(*segment, scaling=scaling, window=window, softcap=softcap)
            for segment in zip(*split, strict=True)
        ]
    )


def _has_kernel(query: Tensor, key: Tensor, value: Tensor, *, softcap: float | None) -> bool:
    narrow = query.dtype in {torch.bfloat16, torch.float16}
    return (
        is_gpu(query.device)
        and narrow
        and softcap is None
        and key.shape[-1] == value.shape[-1] <= 256
    )


def _attend_once(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Attend within one sequence. [T, A, D], [T, K, D], [T, K, D] -> [T, A, D]."""
    query, key, value = (part.transpose(0, 1)[None] for part in (query, key, value))
    length = query.shape[2]
    mask = None
    if softcap is not None or (window is not None and window < length):
        mask = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
        mask = mask if window is None else mask.triu(1 - window)
    if softcap is not None and mask is not None:
        repeats = query.shape[1] // key.shape[1]
        key, value = (part.repeat_interleave(repeats, dim=1) for part in (key, value))
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        products = softcap * torch.tanh(query @ key.transpose(2, 3) * scale / softcap)
        weights = products.masked_fill(~mask, -torch.inf).softmax(dim=-1, dtype=torch.float32)
        result = weights.to(value.dtype) @ value
    else:
        result = scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            scale=scaling,
            enable_gqa=key.shape[1] != query.shape[1],
        )
    return result[0].transpose(0, 1)


AttentionInterface.register(IMPLEMENTATION, attend)
