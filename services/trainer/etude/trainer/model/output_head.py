"""Output head: log-probs and entropies of given tokens, computed in chunks of tokens.

Logits of all tokens are never in memory together, neither forward nor backward: a chunk has
CHUNK_LOGITS of them, and the backward pass computes them again. A batch that is one chunk keeps its
log-probs instead, which costs the same memory and saves the second matrix product.

Shapes: N tokens to predict, H hidden size, V vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from typing_extensions import override

from etude.trainer.model.compute_device import is_gpu

CHUNK_LOGITS = 1 << 26
"""Logits of one chunk: 256 MiB in fp32."""


class LogitTransform(NamedTuple):
    """Change of the logits between the output layer and the softmax."""

    factor: float = 1.0
    """Multiplies them first (Cohere, Granite, MiniCPM)."""
    cap: float | None = None
    """Bounds them then, by cap * tanh(logits / cap) (Gemma 2)."""

    def apply(self, logits: Tensor) -> Tensor:
        """Transform logits of any shape."""
        if self.factor != 1.0:
            logits = logits * self.factor
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)

    def backward(self, gradient: Tensor, transformed: Tensor) -> Tensor:
        """Gradient at the logits, from the one at the transformed logits."""
        if self.cap is not None:
            gradient = gradient * (1 - (transformed / self.cap).square())
        return gradient if self.factor == 1.0 else gradient * self.factor


UNCHANGED = LogitTransform()
"""Logits as the output layer gives them."""


class GuessScores(NamedTuple):
    """Sums over the guesses of a head of multi-token prediction, each a scalar."""

    loss: Tensor
    """Cross-entropy under the teacher's distributions, in nats, with gradient."""
    entropy: Tensor
    """Of the teacher's distributions, in nats: the least that the loss can be."""
    agreeing: Tensor
    """Guesses whose likeliest token is the teacher's."""


class TokenScores(NamedTuple):
    """Log-probs of the requested tokens, and the entropies at their places."""

    logprobs: Tensor
    """Of the tokens, with gradient. [N]"""
    entropy: Tensor
    """Of the distributions that they were predicted from, in nats, without gradient. [N]"""
    guesses: GuessScores | None = None
    """Of the head of multi-token prediction, if it was asked for."""


def score_tokens(
    hidden: Tensor,
    token_ids: Tensor,
    *,
    weight: Tensor,
    bias: Tensor | None = None,
    transform: LogitTransform = UNCHANGED,
    chunk_logits: int = CHUNK_LOGITS,
) -> TokenScores:
    """Score tokens by the hidden states that predict them; memory is O(chunk * V).

    Sums are in fp32 for every number format of hidden and weight.

    Args:
        hidden: [N, H]
        token_ids: [N]
        weight: of the output layer. [V, H]
        bias: [V]
        transform: of the logits.
        chunk_logits: logits in memory at a time; at least one token is taken.
    """
    rows = max(1, chunk_logits // weight.shape[0])
    scores: tuple[Tensor, Tensor] = _ChunkedHead.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, token_ids, transform, rows
    )
    return TokenScores(*scores)


class _ChunkedHead(torch.autograd.Function):
    """Log-softmax of a linear layer at chosen tokens; the backward pass recomputes the logits."""

    @staticmethod
    @override
    def forward(
        ctx: FunctionCtx,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        token_ids: Tensor,
        transform: LogitTransform,
        rows: int,
    ) -> tuple[Tensor, Tensor]:
        logprobs = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        entropy = torch.empty_like(logprobs)
        only_chunk: Tensor | None = None
        left, right = common_format(hidden, weight)
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, len(hidden), rows):
                part = slice(start, start + rows)
                every = transform.apply(head_logits(left[part], right, bias)).log_softmax(dim=-1)
                logprobs[part] = every.gather(1, token_ids[part, None])[:, 0]
                entropy[part] = -(every.exp() * every).sum(dim=-1)
                only_chunk = every if len(hidden) <= rows and transform.cap is None else None
        saved = (hidden, weight, bias, token_ids, only_chunk)
        ctx.save_for_backward(*saved)  # type: ignore[arg-type]  # torch takes None
        ctx.transform, ctx.rows = transform, rows  # type: ignore[attr-defined]
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    @override
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, token_ids, only_chunk = ctx.saved_tensors  # type: ignore[attr-defined]
        transform: LogitTransform = ctx.transform  # type: ignore[attr-defined]
        rows: int = ctx.rows  # type: ignore[attr-defined]
        needs = ctx.needs_input_grad  # type: ignore[attr-defined]
        for_hidden = torch.zeros_like(hidden, dtype=torch.float32) if needs[0] else None
        for_weight = torch.zeros_like(weight, dtype=torch.float32) if needs[1] else None
        for_bias = torch.zeros_like(bias, dtype=torch.float32) if needs[2] else None
        left, right = common_format(hidden, weight)
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, len(hidden), rows):
                part = slice(start, start + rows)
                own, ids = left[part], token_ids[part, None]
                transformed = None
                every = only_chunk
                if every is None:
                    transformed = transform.apply(head_logits(own, right, bias))
                    every = transformed.log_softmax(dim=-1)
                # d log p(token) / d logits = [token] - p, as torch's own log-softmax has it.
                change = torch.zeros_like(every).scatter_(1, ids, gradients[0][part, None])
                change = torch._log_softmax_backward_data(change, every, 1, torch.float32)
                change = transform.backward(change, every if transformed is None else transformed)
                if for_hidden is not None:
                    for_hidden[part] = _product(change, right)
                if for_weight is not None:
                    _add_product(for_weight, change.t(), own)
                if for_bias is not None:
                    for_bias += change.sum(dim=0)
        return (
            None if for_hidden is None else for_hidden.to(hidden.dtype),
            None if for_weight is None else for_weight.to(weight.dtype),
            None if for_bias is None else for_bias.to(bias.dtype),
            None,
            None,
            None,
        )


def head_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Logits of hidden states in a common format, in fp32."""
    logits = _product(hidden, weight.t())
    return logits if bias is None else logits + bias.float()


def common_format(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Both in one number format: the narrower one on a GPU, fp32 on a CPU."""
    wide = hidden.dtype == weight.dtype == torch.float32
    if wide or not is_gpu(hidden.device):
        return hidden.float(), weight.float()
    narrow = hidden.dtype if weight.dtype == torch.float32 else weight.dtype
    return hidden.to(narrow), weight.to(narrow)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Matrix product with sums and result in fp32."""
    if right.dtype == torch.float32:
        return left @ right
    return torch.mm(left.to(right.dtype), right, out_dtype=torch.float32)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add a matrix product to a total in fp32."""
    if right.dtype == torch.float32:
        total.addmm_(left, right)
    else:
        total += _product(left, right)
