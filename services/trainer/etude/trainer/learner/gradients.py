"""Gradients of a batch: this rank's microbatches through the policy and the objective.

Shapes: N trained tokens of one microbatch.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from etude.trainer.learner.objective import Objective, Reference
from etude.trainer.learner.rows import TrainingRow
from etude.trainer.learner.sequence_packing import (
    Microbatch,
    Packing,
    collate,
    plan_microbatches,
)
from etude.trainer.model.fsdp import RankGroup
from etude.trainer.model.policy import Policy


def accumulate_gradients(
    policy: Policy,
    rows: Sequence[TrainingRow],
    objective: Objective,
    *,
    ranks: RankGroup,
    packing: Packing,
    guesses: bool = False,
) -> float:
    """Replace the parameters' gradients by the gradient of the batch's loss; collective.

    Returns:
        The loss of the whole batch.
    """
    loss = backward_rows(policy, rows, objective, ranks=ranks, packing=packing, guesses=guesses)
    return float(ranks.total(loss))


def backward_rows(
    policy: Policy,
    rows: Sequence[TrainingRow],
    objective: Objective,
    *,
    ranks: RankGroup,
    packing: Packing,
    guesses: bool = False,
) -> Tensor:
    """Replace the parameters' gradients, and leave the loss a tensor; collective.

    A plan of a step's memory runs it on tensors without values.

    Returns:
        The loss of this rank's rows, on the CPU. []
    """
    policy.zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    for loss in microbatch_losses(
        policy, rows, objective, ranks=ranks, packing=packing, guesses=guesses
    ):
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        total += loss.detach().cpu()
    ranks.add_gradients(policy.adapters.parameters())
    return total


def microbatch_losses(
    policy: Policy,
    rows: Sequence[TrainingRow],
    objective: Objective,
    *,
    ranks: RankGroup,
    packing: Packing,
    guesses: bool = False,
) -> Iterator[Tensor]:
    """Compute the loss of each of this rank's microbatches; every one is collective.

    Ranks of a context group have the same ones, and the loss of its own tokens each.

    Args:
        policy: scores the tokens.
        rows: of all ranks.
        objective: the loss of scored tokens.
        ranks: that share the rows.
        packing: form of the microbatches.
        guesses: whether the head of multi-token prediction guesses, too.
    """
    plan = plan_microbatches(
        [row.token_ids.size for row in rows],
        ranks=ranks.num_shares,
        max_tokens=packing.max_tokens,
        cost=packing.cost,
        packed=packing.packed,
    )
    for places in plan[ranks.share]:
        microbatch = collate(
            [rows[place] for place in places],
            device=ranks.device,
            packed=packing.packed,
            context=ranks.context,
        )
        policy.replay_routes(microbatch.routes)
        scores = policy(
            microbatch.token_ids,
            microbatch.rows,
            microbatch.places,
            microbatch.lengths,
            microbatch.guessing if guesses else None,
        )
        yield objective(scores, microbatch)


def reference_scorer(reference: nn.Module) -> Reference:
    """Log-probs by the weights at the start of the phase, without gradient."""

    def logprobs(microbatch: Microbatch) -> Tensor:
        if isinstance(reference, Policy):
            reference.replay_routes(microbatch.routes)
        with torch.no_grad():
            scores = reference(
                microbatch.token_ids, microbatch.rows, microbatch.places, microbatch.lengths
            )
        known: Tensor = scores.logprobs
        return known

    return logprobs
