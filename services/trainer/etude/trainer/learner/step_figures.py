"""Figures of a step: use of the hardware, and the result of a batch that was left out."""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from etude.trainer.learner.batches import StepResult
from etude.trainer.learner.divergence import Losses
from etude.trainer.learner.objective import PolicyObjective
from etude.trainer.learner.optimiser import Update
from etude.trainer.learner.rows import TrainingRow, sample_rows
from etude.trainer.learner.sequence_packing import Microbatch
from etude.trainer.model.flops import SequenceCost, peak_operations
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


def complete_result(
    result: StepResult,
    update: Update,
    trained: Sequence[TrainingRow],
    *,
    cost: SequenceCost,
    devices: int,
    device: torch.device,
) -> StepResult:
    """Add the use of the hardware; a batch that was left out keeps no other figure.

    Args:
        result: of the step.
        update: of the optimiser.
        trained: rows of all ranks.
        cost: of one sequence.
        devices: ranks that shared the work, one device each.
        device: of this rank; all have the same.
    """
    peak = peak_operations(device)
    if peak is not None and result.seconds > 0:
        operations = sum(cost.of(row.token_ids.size) for row in trained)
        result = dataclasses.replace(result, mfu=operations / result.seconds / peak / devices)
    if not update.is_skipped:
        return result
    return dataclasses.replace(
        result,
        loss=0.0,
        grad_norm=0.0,
        entropy=0.0,
        mismatch_mean=0.0,
        mismatch_max=0.0,
        mismatch_current=None,
        current_tokens=0,
        clip_fraction=0.0,
        extra={},
        is_skipped=True,
    )
