"""KL divergence from the reference weights: penalty and estimator.

Shapes: N trained tokens.
"""

from torch import Tensor


def kl_penalty(trainer: Tensor, reference: Tensor, *, coefficient: float) -> Tensor:
    """Penalty to subtract from each token's advantage: coefficient * (trainer - reference). [N].

    It carries no gradient. Differentiating this estimator as a loss would be a no-op that adds
    noise, because its expected gradient is 0; inside the reward it has the gradient of the
    per-state divergence.

    Source: J. Schulman, "Approximating KL divergence" (k1); https://arxiv.org/abs/2506.09477.
    """
    return coefficient * (trainer - reference).detach()


def k3_estimate(log_ratio: Tensor) -> Tensor:
    """exp(x) - 1 - x >= 0, whose mean estimates the divergence; for reports only. [N].

    Args:
        log_ratio: log of the other distribution over the one that sampled.

    Source: J. Schulman, "Approximating KL divergence".
    """
    return log_ratio.expm1() - log_ratio
