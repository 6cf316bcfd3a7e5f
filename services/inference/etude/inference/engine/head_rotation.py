"""Rotary embedding of CPU engines for queries and keys that have an axis of heads.

vLLM's CPU kernel takes rows with the heads side by side. Of latent attention (DeepSeek) it gets
[T, heads, size], and turns one head alone by each position: log-probs of all but the first token
were those of another model.
"""

from collections.abc import Callable

from torch import Tensor
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

Rotated = tuple[Tensor, Tensor | None]

_vllm_forward: Callable[[RotaryEmbedding, Tensor, Tensor, Tensor | None], Rotated] = (
    RotaryEmbedding.forward_cpu
)


def rotate_every_head() -> None:
    """Let vLLM compute heads of their own axis by its plain code on CPUs; repeatable."""
    RotaryEmbedding.forward_cpu = _forward


def _forward(
    embedding: RotaryEmbedding, positions: Tensor, query: Tensor, key: Tensor | None = None
) -> Rotated:
    if query.ndim == 2:
        return _vllm_forward(embedding, positions, query, key)
    rotated: Rotated = embedding.forward_native(positions, query, key)
    return rotated
