"""Surrogate losses per token, and estimates of divergences.

Shapes: N trained tokens.
"""

from typing import NamedTuple

import torch
from torch import Tensor

MAX_DPPO_RATIO = 20.0
"""Largest importance ratio of DPPO."""

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


def sequence_clip(
    logprobs: Tensor, *, log_ratio: Tensor, advantages: Tensor, low: float, high: float
) -> Surrogate:
    """-min(s A, clip(s, 1 - low, 1 + high) A), s = exp(log_ratio) of a whole rollout. [N].

    The mean over the rollout's tokens has the gradient of its ratio: s times the mean gradient of
    its log-probs. The value of s may come from other passes than the gradient.

    Args:
        logprobs: of the trainer, with gradient.
        log_ratio: mean of logprobs - anchor over the rollout of each token, without gradient.
        advantages: one per token, the same over a rollout.
        low: clip below 1 - low.
        high: clip above 1 + high.

    Source: GSPO, https://arxiv.org/abs/2507.18071.
    """
    value = log_ratio.clamp(-MAX_EXPONENT, MAX_EXPONENT).exp()
    ratio = value * (logprobs - logprobs.detach()).exp()
    unclipped, clipped = ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages
    return Surrogate(-torch.minimum(unclipped, clipped), clipped < unclipped)


def capped_policy_gradient(
    logprobs: Tensor, *, anchor: Tensor, advantages: Tensor, high: float
) -> Surrogate:
    """-min(r, 1 + high) A log p, with r = exp(logprobs - anchor) as a constant. [N].

    Args:
        logprobs: log p, of the trainer, with gradient.
        anchor: log-probs that r is relative to, without gradient.
        advantages: one per token.
        high: cap above 1 + high.

    Source: CISPO, https://arxiv.org/abs/2506.13585, without its lower bound, as its experiments.
    """
    ratio = importance_ratio(logprobs.detach(), anchor)
    return Surrogate(-ratio.clamp(max=1 + high) * advantages * logprobs, ratio > 1 + high)


def total_variation_mask(
    logprobs: Tensor, *, sampler: Tensor, advantages: Tensor, divergence: float
) -> Surrogate:
    """-keep r A log p, with r = exp(logprobs - sampler) as a constant of at most 20. [N].

    A token is kept unless its probability has moved by more than the divergence from the sampler's,
    up where A > 0, down elsewhere.

    Args:
        logprobs: log p, of the trainer, with gradient.
        sampler: log-probs recorded at sampling.
        advantages: one per token.
        divergence: largest change of the probability.

    Source: DPPO with total variation, https://arxiv.org/abs/2602.04879.
    """
    change = logprobs.detach().exp() - sampler.exp()
    moved = torch.where(advantages > 0, change > divergence, change < -divergence)
    ratio = importance_ratio(logprobs.detach(), sampler).clamp(max=MAX_DPPO_RATIO)
    return Surrogate(torch.where(moved, 0.0, -ratio * advantages * logprobs), moved)


def soft_gate(
    logprobs: Tensor,
    *,
    anchor: Tensor,
    advantages: Tensor,
    temperature_positive: float,
    temperature_negative: float,
) -> Surrogate:
    """-(4 / t) sigmoid(t (r - 1)) A, with r = exp(logprobs - anchor). [N].

    The gradient at r = 1 is that of the policy gradient, and fades as r moves away.

    Args:
        logprobs: of the trainer, with gradient.
        anchor: log-probs that r is relative to, without gradient.
        advantages: one per token.
        temperature_positive: t where A > 0.
        temperature_negative: t elsewhere.

    Source: SAPO, https://arxiv.org/abs/2511.20347.
    """
    ratio = importance_ratio(logprobs, anchor)
    positive, negative = (
        torch.full_like(advantages, each) for each in (temperature_positive, temperature_negative)
    )
    steep = torch.where(advantages > 0, positive, negative)
    never = torch.zeros_like(advantages, dtype=torch.bool)
    return Surrogate(-4 / steep * torch.sigmoid(steep * (ratio - 1)) * advantages, never)


def kl_penalty(trainer: Tensor, reference: Tensor, *, coefficient: float) -> Tensor:
    """Penalty to subtract from each token's advantage: coefficient * (trainer - reference). [N].

    It carries no gradient. Differentiating this estimator as a loss would be a no-op that adds
    noise, because its expected gradient is 0; inside the reward it has the gradient of the
    per-state divergence.

    Source: J. Schulman, "Approximating KL divergence" (k1); https://arxiv.org/abs/2506.09477.
    """
    return coefficient * (trainer - reference).detach()


def log_ratio_penalty(logprobs: Tensor, sampler: Tensor, *, coefficient: float) -> Tensor:
    """Coefficient * (logprobs - sampler)^2, with its gradient: a pull to the sampler. [N].

    Twice k2, whose gradient as a loss is that of the divergence.

    Source: prime-rl; J. Schulman, "Approximating KL divergence" (k2).
    """
    return coefficient * (logprobs - sampler).clamp(-MAX_EXPONENT, MAX_EXPONENT).square()


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
