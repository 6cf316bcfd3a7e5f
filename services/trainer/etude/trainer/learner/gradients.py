"""Gradient accumulation over the microbatches and ranks of one batch."""

from collections.abc import Sequence

import torch

from etude.trainer.learner import sequence_packing
from etude.trainer.learner.microbatches import collate
from etude.trainer.learner.objective import Objective
from etude.trainer.learner.rows import TrainingRow
from etude.trainer.model.fsdp import RankGroup
from etude.trainer.model.policy import Policy


def accumulate_gradients(
    policy: Policy,
    rows: Sequence[TrainingRow],
    objective: Objective,
    *,
    ranks: RankGroup,
    max_tokens: int,
) -> float:
    """Replace the parameters' gradients by the gradient of the batch's loss; collective.

    Args:
        policy: the model to differentiate.
        rows: of all ranks, the same on each.
        objective: loss of one microbatch.
        ranks: the ranks that share the work.
        max_tokens: padded tokens of one microbatch.

    Returns:
        The loss of the whole batch.
    """
    policy.zero_grad()
    plan = sequence_packing.plan_microbatches(
        [row.token_ids.size for row in rows], ranks=ranks.size, max_tokens=max_tokens
    )
    total = torch.zeros((), dtype=torch.float64)
    for places in plan[ranks.rank]:
        microbatch = collate([rows[place] for place in places], device=ranks.device)
        scores = policy(microbatch.token_ids, microbatch.rows, microbatch.places)
        loss = objective(scores, microbatch)
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        total += loss.detach().cpu()
    return float(ranks.total(total))
