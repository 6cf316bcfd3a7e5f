"""Importance-sampling corrections (TIS, IcePop) for tokens that older or inexact weights sampled.

rho = exp(trainer - sampler log-prob), both without gradient. A weight multiplies the token's
surrogate; a token of weight 0 stays in every denominator.

Shapes: N trained tokens.
"""

import torch
from torch import Tensor


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
