"""Divergence of the policy from the weights that sampled a batch, before a step is decided on."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from etude.trainer.algorithms.losses import divergence_estimate
from etude.trainer.learner.objective import Objective
from etude.trainer.learner.rows import TrainingRow, sample_rows
from etude.trainer.learner.sequence_packing import Microbatch
from etude.trainer.model.fsdp import RankGroup, reshard_parameters
from etude.trainer.model.output_head import TokenScores
from etude.trainer.model.policy import Policy

SAMPLE_TOKENS = 16_384
"""Tokens of the rows that are scored. At a divergence of 0.01 nats per token, log-ratios are about
0.14, and the error of their estimate over as many tokens is about 1 % of it."""

Losses = Callable[[Sequence[TrainingRow], Objective], Iterable[Tensor]]
"""Losses of this rank's microbatches of some rows; every one is collective."""


@torch.no_grad()
def measure_divergence(
    policy: Policy, rows: Sequence[TrainingRow], *, losses: Losses, ranks: RankGroup, seed: int
) -> float:
    """Estimate the mean KL(policy || sampler) of a sampled token, in nats; collective.

    Args:
        policy: as it is.
        rows: of the batch.
        losses: of this rank's microbatches.
        ranks: all ranks.
        seed: of the draw of rows, the same on all ranks.

    Returns:
        0 without any sampled token.
    """
    sums = torch.zeros(2, dtype=torch.float64)

    def record(scores: TokenScores, microbatch: Microbatch) -> Tensor:
        values = divergence_estimate((scores.logprobs - microbatch.sampler_logprobs).double())
        sums.add_(torch.stack([values.sum(), torch.full_like(values, 1.0).sum()]).cpu())
        return values.sum()

    for _ in losses(sample_rows(rows, tokens=SAMPLE_TOKENS, seed=seed), record):
        pass  # each is one forward pass
    reshard_parameters(policy)
    total, tokens = ranks.total(sums).tolist()
    return float(total / tokens) if tokens else 0.0
