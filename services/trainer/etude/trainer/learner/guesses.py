"""Objective of a step that also trains the head of multi-token prediction."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from etude.common.api.meta import number
from etude.common.api.run.phases import Phase
from etude.common.errors import InvalidFieldError
from etude.trainer.learner.objective import Objective
from etude.trainer.learner.rows import TrainingRow
from etude.trainer.learner.sequence_packing import Microbatch, num_guesses
from etude.trainer.model.fsdp import RankGroup
from etude.trainer.model.mtp.heads import find_heads
from etude.trainer.model.output_head import TokenScores
from etude.trainer.model.policy import Policy


@dataclass(slots=True, kw_only=True)
class GuessObjective:
    """The loss of another objective, and the gradient of the head's loss added to its gradient.

    The value stays the other's, so that losses compare with those of steps without a head.
    """

    policy: Objective
    loss_weight: float
    count: int
    """Guesses of the batch on all ranks."""
    sums: list[Tensor] = field(default_factory=list)
    """Loss, entropy and agreeing guesses of each microbatch. [3]"""

    def __call__(self, scores: TokenScores, microbatch: Microbatch) -> Tensor:
        loss = self.policy(scores, microbatch)
        guesses = scores.guesses
        if guesses is None:
            raise AssertionError("the pass was not asked for guesses")
        self.sums.append(torch.stack([each.detach().double().cpu() for each in guesses]))
        scaled = guesses.loss * (self.loss_weight / max(1, self.count))
        return loss + (scaled - scaled.detach())

    def summary(self, ranks: RankGroup) -> dict[str, float]:
        """Means over the guesses of all ranks; collective. None without guesses."""
        own = torch.stack(self.sums).sum(dim=0) if self.sums else torch.zeros(3).double()
        loss, entropy, agreeing = (ranks.total(own) / max(1, self.count)).tolist()
        if not self.count:
            return {}
        return {"mtp_loss": loss, "mtp_kl": loss - entropy, "mtp_agreement": agreeing}


def add_guesses(
    objective: Objective, phase: Phase, rows: Sequence[TrainingRow]
) -> GuessObjective | None:
    """Add the loss of the head to an objective; None if the phase trains no head.

    Args:
        objective: of the policy.
        phase: under way.
        rows: of all ranks.
    """
    if phase.mtp is None:
        return None
    return GuessObjective(
        policy=objective,
        loss_weight=number(phase.mtp.loss_weight),
        count=sum(num_guesses(row) for row in rows),
    )


def check_head(policy: Policy, phase: Phase) -> None:
    """Check that the policy has a head that the phase can train.

    Raises:
        InvalidFieldError: it has none, or none that can be trained.
    """
    if phase.mtp is None:
        return
    field_name = f"phase {phase.name}: mtp"
    if not find_heads(policy.model):
        raise InvalidFieldError(
            field_name,
            "the model has no head of multi-token prediction; add one: etude model add-head",
        )
    if policy.lora is not None:
        raise InvalidFieldError(field_name, "adapters are trained instead of it; remove one")
    if policy.context.size > 1:
        raise InvalidFieldError(field_name, "needs whole rows; set roles.trainer.mesh.context: 1")
