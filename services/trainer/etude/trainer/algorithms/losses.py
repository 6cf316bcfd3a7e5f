"""Surrogate losses per token: PPO clip, and policy gradient with importance ratios.

Shapes: N trained tokens.
"""

from typing import NamedTuple

import torch
from torch import Tensor

MAX_EXPONENT = 20.0
"""Log-ratios are clamped to this size, so that no exponential overflows."""


class Surrogate(NamedTuple):
    """Loss per token, and the tokens whose gradient was clipped."""

    values: Tensor
    """[N]."""
    clipped: Tensor
    """[N], boolean."""


def importance_ratio(logprobs: Tensor, anchor: Tensor) -> Tensor:
    """exp(logprobs - anchor), kept finite. [N], [N] -> [N]."""
    return (logprobs - anchor).clamp(-MAX_EXPONENT, MAX_EXPONENT).exp()


def ppo_clip(
    logprobs: Tensor, *, anchor: Tensor, advantages: Tensor, low: float, high: float
) -> Surrogate:
    """-min(r A, clip(r, 1 - low, 1 + high) A), r = exp(logprobs - anchor). [N].

    Args:
        logprobs: of the trainer, with gradient.
        anchor: log-probs that r is relative to, without gradient.
        advantages: one per token.
        low: clip below 1 - low.
        high: clip above 1 + high.

    Source: PPO, https://arxiv.org/abs/1707.06347; two widths: DAPO, https://arxiv.org/abs/2503.14476.
    """
    ratio = importance_ratio(logprobs, anchor)
    bounded = ratio.clamp(1 - low, 1 + high)
    unclipped, clipped = ratio * advantages, bounded * advantages
    return Surrogate(-torch.minimum(unclipped, clipped), clipped < unclipped)


def policy_gradient(logprobs: Tensor, *, anchor: Tensor, advantages: Tensor) -> Surrogate:
    """-r A log p, with r = exp(logprobs - anchor) as a constant. [N].

    Args:
        logprobs: log p, of the trainer, with gradient.
        anchor: log-probs that r is relative to, without gradient.
        advantages: one per token.

    Source: REINFORCE with importance weights.
    """
    ratio = importance_ratio(logprobs.detach(), anchor)
    never = torch.zeros_like(advantages, dtype=torch.bool)
    return Surrogate(-ratio * advantages * logprobs, never)


def kl_penalty(trainer: Tensor, reference: Tensor, *, coefficient: float) -> Tensor:
    """Penalty to subtract from each token's advantage: coefficient * (trainer - reference). [N].

    It carries no gradient. Differentiating this estimator as a loss would be a no-op that adds
    noise, because its expected gradient is 0; inside the reward it has the gradient of the
    per-state divergence.

    Source: J. Schulman, "Approximating KL divergence" (k1); https://arxiv.org/abs/2506.09477.
    """
    return coefficient * (trainer - reference).detach()


def divergence_estimate(log_ratio: Tensor) -> Tensor:
    """Estimate KL(policy || sampler) per token: r x - (r - 1) >= 0 with r = exp(x). [N].

    Both terms are importance-weighted: the mean of r - 1 over the sampler's tokens is 0, so that it
    adds no bias and takes away most of the noise.

    Args:
        log_ratio: x, log of the policy over the sampler, at tokens that the sampler drew.

    Source: J. Schulman, "Approximating KL divergence", the control variate of k3.
    """
    bounded = log_ratio.clamp(-MAX_EXPONENT, MAX_EXPONENT)
    return bounded.exp() * bounded - bounded.expm1()


def k3_estimate(log_ratio: Tensor) -> Tensor:
    """exp(x) - 1 - x >= 0, whose mean estimates the divergence; for reports only. [N].

    Args:
        log_ratio: log of the other distribution over the one that sampled.

    Source: J. Schulman, "Approximating KL divergence".
    """
    return log_ratio.expm1() - log_ratio
