"""Importance-sampling corrections of tokens that older or inexact weights sampled.

rho = exp(proximal - sampler log-prob), both without gradient. A weight multiplies the token's
surrogate; a token of weight 0 stays in every denominator.

Shapes: N trained tokens.
"""

import torch
from torch import Tensor

from etude.common.api.run.algorithms import Correction
from etude.trainer.algorithms.losses import MAX_EXPONENT, importance_ratio


def truncated_weights(rho: Tensor, *, high: float) -> Tensor:
    """min(rho, high). [N].

    Source: truncated importance sampling (TIS), https://fengyao.notion.site/off-policy-rl.
    """
    return rho.clamp(max=high)


def ice_pop_weights(rho: Tensor, *, low: float, high: float) -> Tensor:
    """Keep rho where low <= rho <= high, 0 elsewhere. [N].

    Source: IcePop, https://arxiv.org/abs/2510.18855.
    """
    return torch.where((rho >= low) & (rho <= high), rho, 0.0)


def sequence_mask_weights(
    rho: Tensor, sequence_log_rho: Tensor, *, low: float, high: float
) -> Tensor:
    """Keep rho where the geometric mean of its rollout is within [low, high]. [N], [N] -> [N].

    Source: masked importance sampling of whole sequences,
    https://fengyao.notion.site/off-policy-rl.
    """
    mean = sequence_log_rho.clamp(-MAX_EXPONENT, MAX_EXPONENT).exp()
    return ice_pop_weights(mean, low=low, high=high).sign() * rho


def off_policy_mask(sequence_log_rho: Tensor, advantages: Tensor, *, delta: float) -> Tensor:
    """Weight 0 for rollouts of negative advantage that are unlikely by now, 1 for others. [N].

    Args:
        sequence_log_rho: mean of proximal - sampler log-prob over the rollout of each token.
        advantages: of the rollout of each token.
        delta: largest decrease of the mean log-prob, in nats.

    Source: DeepSeek-V3.2, https://arxiv.org/abs/2512.02556, section 3.1.
    """
    return (~((advantages < 0) & (-sequence_log_rho > delta))).to(sequence_log_rho.dtype)


def correction_weights(
    proximal: Tensor, sampler: Tensor, *, correction: Correction, sequence_log_rho: Tensor
) -> Tensor | None:
    """Importance-sampling weight of each token; None if the surrogate's own ratio does the work.

    Args:
        proximal: log-probs of the trainer before the batch's updates. [N]
        sampler: log-probs recorded at sampling. [N]
        correction: of the algorithm.
        sequence_log_rho: mean of proximal - sampler over the rollout of each token; read by
            SequenceMaskTIS alone. [N]

    Raises:
        ValueError: a bound is missing, which the check of the parameters excludes.
    """
    if correction.kind == "None":
        return None
    rho = importance_ratio(proximal, sampler)
    match correction.kind, correction.low, correction.high:
        case "TIS", None, float(high):
            return truncated_weights(rho, high=high)
        case "IcePop", float(low), float(high):
            return ice_pop_weights(rho, low=low, high=high)
        case "SequenceMaskTIS", float(low), float(high):
            return sequence_mask_weights(rho, sequence_log_rho, low=low, high=high)
        case _:
            raise ValueError(f"{correction.kind} with low {correction.low}, high {correction.high}")
