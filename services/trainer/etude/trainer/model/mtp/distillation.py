"""Distillation: cross-entropy of guessed distributions under the model's own, in chunks of tokens.

Logits of all tokens are never in memory together. The gradient is computed with the loss, chunk by
chunk, so that no logits are computed twice.
Shapes: N guesses, H hidden size, V vocabulary.
"""

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from typing_extensions import override

from etude.trainer.model.output_head import CHUNK_LOGITS, GuessScores, common_format, head_logits


def score_guesses(
    guesses: Tensor,
    teachers: Tensor,
    *,
    weight: Tensor,
    bias: Tensor | None = None,
    chunk_logits: int = CHUNK_LOGITS,
) -> GuessScores:
    """Score hidden states by those of the teacher, through one output layer.

    The gradient reaches the guesses alone; memory is O(chunk * V).

    Args:
        guesses: [N, H]
        teachers: of the same tokens. [N, H]
        weight: of the output layer. [V, H]
        bias: [V]
        chunk_logits: logits in memory at a time; at least one guess is taken.
    """
    rows = max(1, chunk_logits // weight.shape[0])
    frozen = (teachers.detach(), weight.detach(), None if bias is None else bias.detach())
    scores: tuple[Tensor, ...] = _Distillation.apply(guesses, *frozen, rows)  # type: ignore[no-untyped-call]
    return GuessScores(*scores)


class _Distillation(torch.autograd.Function):
    @staticmethod
    @override
    def forward(
        ctx: FunctionCtx,
        guesses: Tensor,
        teachers: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        rows: int,
    ) -> tuple[Tensor, ...]:
        sums = torch.zeros(3, dtype=torch.float32, device=guesses.device)
        needs = ctx.needs_input_grad[0]  # type: ignore[attr-defined]
        gradient = torch.zeros_like(guesses, dtype=torch.float32) if needs else None
        left, right = common_format(guesses, weight)
        known, _ = common_format(teachers, weight)
        with torch.autocast(guesses.device.type, enabled=False):
            for start in range(0, len(guesses), rows):
                part = slice(start, start + rows)
                teacher = head_logits(known[part], right, bias).log_softmax(dim=-1)
                guess = head_logits(left[part], right, bias).log_softmax(dim=-1)
                wanted = teacher.exp()
                sums[0] -= (wanted * guess).sum()
                sums[1] -= (wanted * teacher).sum()
                sums[2] += (teacher.argmax(dim=-1) == guess.argmax(dim=-1)).sum()
                if gradient is not None:
                    gradient[part] = (guess.exp() - wanted) @ weight.float()
        ctx.save_for_backward(gradient)  # type: ignore[arg-type]  # torch takes None
        ctx.dtype = guesses.dtype  # type: ignore[attr-defined]
        loss, entropy, agreeing = (each.clone() for each in sums)
        ctx.mark_non_differentiable(entropy, agreeing)
        return loss, entropy, agreeing

    @staticmethod
    @once_differentiable
    @override
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        [gradient] = ctx.saved_tensors  # type: ignore[attr-defined]
        scaled = None if gradient is None else (gradients[0] * gradient).to(ctx.dtype)  # type: ignore[attr-defined]
        return scaled, None, None, None, None
