"""Figures of a step: use of the hardware, and the result of a batch that was left out."""

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from etude.trainer.learner.batches import StepResult
from etude.trainer.learner.objective import PolicyObjective
from etude.trainer.learner.optimiser import Update
from etude.trainer.learner.proximal import RowScorer
from etude.trainer.learner.rows import TrainingRow, sample_rows
from etude.trainer.learner.sequence_packing import Microbatch
from etude.trainer.model.flops import SequenceCost, peak_operations
from etude.trainer.model.fsdp import reshard_parameters
from etude.trainer.model.output_head import TokenScores


@torch.no_grad()
def score_filtered(
    rows: Sequence[TrainingRow],
    objective: PolicyObjective,
    *,
    scorer: RowScorer,
    seed: int,
) -> int:
    """Record figures of a sample of filtered rows in the objective; collective.

    Each scored token stands for (tokens of all these rows) / (tokens of the scored ones).

    Args:
        rows: of all filtered rollouts.
        objective: of the step.
        scorer: of the weights before the update.
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

    for _ in scorer.losses(scorer.add_proximal(sample), record):  # each is one forward pass
        pass
    reshard_parameters(scorer.policy)
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
    """Add the update's figures and the use of the hardware.

    A batch that was left out keeps the latter alone.

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
        return dataclasses.replace(result, extra=dict(result.extra) | dict(update.figures))
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


def build_policy_result(
    loss: float,
    update: Update,
    figures: Mapping[str, float],
    *,
    trained: Sequence[TrainingRow],
    weight_digest: str,
    seconds: float,
) -> StepResult:
    """Build the result of a policy step from its rows, and from figures by name."""
    extra = dict(figures)
    return StepResult(
        loss=loss,
        grad_norm=update.grad_norm,
        tokens=sum(row.token_ids.size for row in trained),
        trained_tokens=sum(row.places.size for row in trained),
        learning_rate=update.learning_rate,
        entropy=extra.pop("entropy"),
        mismatch_mean=extra.pop("mismatch"),
        mismatch_max=extra.pop("mismatch_max"),
        mismatch_current=extra.pop("mismatch_current", None),
        current_tokens=int(extra.pop("current_tokens")),
        clip_fraction=extra.pop("clipped"),
        weight_digest=weight_digest,
        seconds=seconds,
        extra=extra,
    )


def combine_updates(updates: Sequence[Update]) -> Update:
    """Result of the updates of one batch: the mean norm and figures, and skipped if one was.

    Args:
        updates: in their order, at least one.
    """
    applied = [update.grad_norm for update in updates if not update.is_skipped]
    figures = [update.figures for update in updates if update.figures]
    return Update(
        sum(applied) / max(1, len(applied)),
        updates[0].learning_rate,
        is_skipped=any(update.is_skipped for update in updates),
        figures={n: sum(f[n] for f in figures) / len(figures) for n in set().union(*figures)},
    )
