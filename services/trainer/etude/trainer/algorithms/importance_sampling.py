"""Importance-sampling corrections (TIS, IcePop) for tokens that older or inexact weights sampled.

rho = exp(trainer - sampler log-prob), both without gradient. A weight multiplies the token's
surrogate; a token of weight 0 stays in every denominator.

Shapes: N trained tokens.
"""

import torch
from torch import Tensor

from etude.common.api.run.algorithms import Correction
from etude.trainer.algorithms.losses import importance_ratio


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


def correction_weights(
    trainer: Tensor, sampler: Tensor, *, correction: Correction
) -> Tensor | None:
    """Importance-sampling weight of each token; None if the surrogate's own ratio does the work.

    Raises:
        ValueError: a bound is missing, which the check of the parameters excludes.
    """
    if correction.kind == "None":
        return None
    rho = importance_ratio(trainer, sampler)
    match correction.kind, correction.low, correction.high:
        case "TIS", None, float(high):
            return truncated_weights(rho, high=high)
        case "IcePop", float(low), float(high):
            return ice_pop_weights(rho, low=low, high=high)
        case _:
            raise ValueError(f"{correction.kind} with low {correction.low}, high {correction.high}")
