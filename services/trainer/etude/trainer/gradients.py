"""The gradient of a whole batch, over microbatches and ranks."""

from collections.abc import Sequence

import torch

from etude.trainer import packing
from etude.trainer.microbatches import collate
from etude.trainer.objective import Objective
from etude.trainer.policy import Policy
from etude.trainer.ranks import Ranks
from etude.trainer.rows import Row


def accumulate(
    policy: Policy, rows: Sequence[Row], objective: Objective, *, ranks: Ranks, max_tokens: int
) -> float:
    """Leave the gradient of the loss in the parameters, and nothing of an earlier one; collective.

    Args:
        policy: whose parameters are differentiated.
        rows: of all ranks, the same on each.
        objective: what a microbatch adds to the loss.
        ranks: who shares the work.
        max_tokens: padded tokens of one microbatch.

    Returns:
        The loss of the whole batch.
    """
    policy.zero_grad()
    plan = packing.plan(
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
