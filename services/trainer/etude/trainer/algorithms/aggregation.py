"""Loss aggregation: the weight of each trained token, from totals of the whole batch.

The loss is the weighted sum of the tokens' surrogates. The weights are fixed before the batch is
cut into ranks and microbatches, so no cut can change the gradient.

Shapes: R rollouts of one batch.
"""

import numpy as np
from numpy.typing import NDArray

Reals = NDArray[np.float64]
Counts = NDArray[np.int64]


def constant_weights(trained: Counts, *, scale: float) -> Reals:
    """1 / (B * scale) for each token, B = rollouts with a trained token. [R] -> [R].

    Every token of the batch counts the same, however long its rollout is.

    Args:
        trained: trained tokens of each rollout, all its links together.
        scale: a constant of the run.

    Source: Dr. GRPO, https://arxiv.org/abs/2503.20783, section 3.2.
    """
    rollouts = max(1, int(np.count_nonzero(trained)))
    return np.full(trained.shape, 1.0 / (rollouts * scale))


def rollout_mean_weights(trained: Counts) -> Reals:
    """1 / (B * tokens of the rollout): the mean over rollouts of their token means. [R] -> [R].

    Source: GRPO, https://arxiv.org/abs/2402.03300.
    """
    rollouts = max(1, int(np.count_nonzero(trained)))
    return 1.0 / (rollouts * np.maximum(trained, 1))


def global_token_weights(trained: Counts) -> Reals:
    """1 / tokens of the batch: the mean over all trained tokens. [R] -> [R].

    Source: DAPO, https://arxiv.org/abs/2503.14476, section 3.3.
    """
    return np.full(trained.shape, 1.0 / max(1, int(trained.sum())))
