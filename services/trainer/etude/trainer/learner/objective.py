"""Objectives: the loss of one microbatch, and figures about the update.

Shapes: N trained tokens of one microbatch.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from etude.trainer.algorithms import losses
from etude.trainer.algorithms.base import AlgorithmSteps
from etude.trainer.algorithms.importance_sampling import correction_weights
from etude.trainer.algorithms.losses import MAX_EXPONENT
from etude.trainer.learner.sequence_packing import Microbatch
from etude.trainer.model.fsdp import RankGroup
from etude.trainer.model.output_head import TokenScores

Objective = Callable[[TokenScores, Microbatch], Tensor]
Reference = Callable[[Microbatch], Tensor]
"""Log-probs of the reference weights. [N]."""


def imitation_loss(scores: TokenScores, microbatch: Microbatch) -> Tensor:
    """Weighted cross-entropy."""
    return -(microbatch.weights * scores.logprobs).sum()


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyObjective:
    """The loss of one policy step, microbatch by microbatch.

    With one update per batch, the log-probs of the gradient pass are those before the update.
    """

    algorithm: AlgorithmSteps
    reference: Reference | None
    """Set if there is a KL penalty."""
    figures: dict[str, list[Tensor]] = field(default_factory=dict)
    """Figures of this rank's trained tokens by name, one value per token."""

    def __call__(self, scores: TokenScores, microbatch: Microbatch) -> Tensor:
        proximal, sampler = scores.logprobs.detach(), microbatch.sampler_logprobs
        advantages = self._advantages(proximal, microbatch)
        correction = correction_weights(
            proximal, sampler, correction=self.algorithm.parameters.correction
        )
        surrogate = self.algorithm.surrogate(
            scores.logprobs,
            anchor=sampler if correction is None else proximal,
            advantages=advantages,
        )
        values = surrogate.values if correction is None else correction * surrogate.values
        self._record_figure("entropy", scores.entropy)
        self._record_figure("mismatch", (proximal - sampler).abs())
        self._record_figure(
            "mismatch_k3",
            losses.k3_estimate((proximal - sampler).clamp(-MAX_EXPONENT, MAX_EXPONENT)),
        )
        self._record_figure("clipped", surrogate.clipped)
        if correction is not None:
            self._record_figure("correction", correction)
        return (microbatch.weights * values).sum()

    def summary(self, ranks: RankGroup) -> dict[str, float]:
        """Means over the trained tokens of all ranks, and the tail of the mismatch; collective."""
        names = ["entropy", "mismatch", "mismatch_k3", "clipped"]
        names += ["correction"] if self.algorithm.parameters.correction.kind != "None" else []
        names += ["reference_kl"] if self.reference is not None else []
        values = {
            name: ranks.gather_values(torch.cat([torch.zeros(0), *self.figures.get(name, ())]))
            for name in names
        }
        means = {name: float(v.double().mean()) if len(v) else 0.0 for name, v in values.items()}
        tail = values["mismatch"].sort().values
        last = len(tail) - 1
        return means | {
            "mismatch_p99": float(tail[int(0.99 * last)]) if len(tail) else 0.0,
            "mismatch_max": float(tail[last]) if len(tail) else 0.0,
        }

    def _advantages(self, proximal: Tensor, microbatch: Microbatch) -> Tensor:
        if self.reference is None:
            return microbatch.advantages
        reference = self.reference(microbatch)
        self._record_figure("reference_kl", proximal - reference)
        return microbatch.advantages - losses.kl_penalty(
            proximal, reference, coefficient=self.algorithm.parameters.kl_coefficient
        )

    def _record_figure(self, name: str, values: Tensor) -> None:
        self.figures.setdefault(name, []).append(values.detach().float().cpu())
