"""Scoring of a sample of filtered rollouts, so that figures cover them at a bounded cost."""

from collections.abc import Sequence

import torch
from torch import Tensor

from etude.trainer.learner.divergence import Losses
from etude.trainer.learner.objective import PolicyObjective
from etude.trainer.learner.rows import TrainingRow, sample_rows
from etude.trainer.learner.sequence_packing import Microbatch
from etude.trainer.model.fsdp import reshard_parameters
from etude.trainer.model.output_head import TokenScores
from etude.trainer.model.policy import Policy


@torch.no_grad()
def score_filtered(
    policy: Policy,
    rows: Sequence[TrainingRow],
    objective: PolicyObjective,
    *,
    losses: Losses,
    seed: int,
) -> int:
    """Record figures of a sample of filtered rows in the objective; collective.

    Each scored token stands for (tokens of all these rows) / (tokens of the scored ones).

    Args:
        policy: before the update.
        rows: of all filtered rollouts.
        objective: of the step.
        losses: of this rank's microbatches.
        seed: of the draw, the same on all ranks.

    Returns:
        Number of sampled tokens whose log-probs were compared.
    """
    budget = objective.algorithm.parameters.filtered_sample_tokens
    sample = sample_rows(rows, tokens=budget, seed=seed)
    scored = sum(row.places.size for row in sample)
    if not scored:
        return 0
    weight = sum(row.places.size for row in rows) / scored

    def record(scores: TokenScores, microbatch: Microbatch) -> Tensor:
        return objective.record_filtered(scores, microbatch, token_weight=weight)

    for _ in losses(sample, record):  # each is one forward pass
        pass
    reshard_parameters(policy)
    return scored
