"""Figures of a step: use of the hardware, and the result of a batch that was left out."""

import dataclasses
from collections.abc import Sequence

import torch

from etude.trainer.learner.batches import StepResult
from etude.trainer.learner.optimiser import Update
from etude.trainer.learner.rows import TrainingRow
from etude.trainer.model.flops import SequenceCost, peak_operations


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
