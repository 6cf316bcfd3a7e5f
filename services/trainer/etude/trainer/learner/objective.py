"""Objectives: the loss of one microbatch, and figures about the update.

Shapes: N trained tokens of one microbatch.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from etude.trainer.algorithms import losses
from etude.trainer.algorithms.base import AlgorithmSteps
from etude.trainer.algorithms.importance_sampling import correction_weights, off_policy_mask
from etude.trainer.algorithms.losses import MAX_EXPONENT
from etude.trainer.algorithms.tokens import TokenLogprobs
from etude.trainer.learner.batches import KlLimitError
from etude.trainer.learner.sequence_packing import Microbatch
from etude.trainer.model.fsdp import RankGroup
from etude.trainer.model.output_head import TokenScores

Objective = Callable[[TokenScores, Microbatch], Tensor]
Reference = Callable[[Microbatch], Tensor]
"""Log-probs of the reference weights. [N]."""


def imitation_loss(scores: TokenScores, microbatch: Microbatch) -> Tensor:
    """Weighted cross-entropy."""
    return -(microbatch.weights * scores.logprobs).sum()


def _no_divergence() -> Tensor:
    return torch.zeros(2, dtype=torch.float64)


@dataclass(slots=True, kw_only=True)
class PolicyObjective:
    """The loss of one policy step, microbatch by microbatch.

    Where a microbatch has no proximal log-probs, those of the gradient pass are the same: there is
    one update per batch. Corrections and the KL penalty are taken from the proximal ones. summary()
    checks that each trained token went through exactly one gradient pass.
    """

    algorithm: AlgorithmSteps
    reference: Reference | None
    """Set if there is a KL penalty."""
    figures: dict[str, list[Tensor]] = field(default_factory=dict)
    """Figures of this rank's scored tokens by name, one value per token."""
    divergence: Tensor = field(default_factory=_no_divergence)
    """Sum over this rank's tokens of the update under way, and their number. [2]"""

    def __call__(self, scores: TokenScores, microbatch: Microbatch) -> Tensor:
        if self.algorithm.parameters.kl_limit is not None:
            log_ratio = (scores.logprobs.detach() - microbatch.sampler_logprobs).double()
            values = losses.divergence_estimate(log_ratio)
            sums = torch.stack([values.sum(), torch.ones_like(values).sum()])
            self.divergence = self.divergence + sums.cpu()
        return self._score(scores, microbatch, token_weight=1.0, is_trained=True)

    def record_filtered(
        self, scores: TokenScores, microbatch: Microbatch, *, token_weight: float
    ) -> Tensor:
        """Record the figures of tokens that have no part in the loss; return their loss.

        Args:
            scores: without gradient.
            microbatch: of rollouts whose advantage is 0.
            token_weight: number of tokens that each of these stands for.
        """
        return self._score(scores, microbatch, token_weight=token_weight, is_trained=False)

    def _score(
        self,
        scores: TokenScores,
        microbatch: Microbatch,
        *,
        token_weight: float,
        is_trained: bool,
    ) -> Tensor:
        sampler = microbatch.sampler_logprobs
        has_proximal = microbatch.proximal_logprobs.numel() > 0
        proximal = microbatch.proximal_logprobs if has_proximal else scores.logprobs.detach()
        correction = self._correction(proximal, microbatch)
        surrogate = self.algorithm.surrogate(
            TokenLogprobs(
                logprobs=scores.logprobs,
                proximal=proximal,
                sampler=sampler,
                is_corrected=self.algorithm.parameters.token_correction.kind != "None",
                sequence_log_ratio=microbatch.sequence_log_ratio,
            ),
            advantages=self._advantages(proximal, microbatch),
        )
        values = surrogate.values if correction is None else correction * surrogate.values
        if self.algorithm.parameters.log_ratio_penalty:
            values = values + losses.log_ratio_penalty(
                scores.logprobs, sampler, coefficient=self.algorithm.parameters.log_ratio_penalty
            )
        self._record_figure("entropy", scores.entropy)
        self._record_figure("mismatch", (proximal - sampler).abs())
        self._record_figure(
            "mismatch_k3",
            losses.k3_estimate((proximal - sampler).clamp(-MAX_EXPONENT, MAX_EXPONENT)),
        )
        self._record_figure("clipped", surrogate.clipped)
        self._record_figure("rho", losses.importance_ratio(proximal, sampler))
        self._record_figure("weight", torch.full_like(proximal, token_weight))
        self._record_figure("is_current", microbatch.is_current)
        self._record_figure("is_trained", torch.full_like(proximal, is_trained))
        if correction is not None:
            self._record_figure("correction", correction)
        return (microbatch.weights * values).sum()

    def judge_update(self, ranks: RankGroup) -> dict[str, float]:
        """Compare the divergence of the update under way with klLimit; the next one begins.

        Collective. The divergence is that of the policy from the sampler, over trained tokens.

        Returns:
            limited_fraction, 1 if the update must be left out, else 0; nothing without a limit.

        Raises:
            KlLimitError: it is beyond the limit, and the phase stops then.
        """
        parameters = self.algorithm.parameters
        limit = parameters.kl_limit
        if limit is None:
            return {}
        total, tokens = ranks.total(self.divergence).tolist()
        self.divergence = _no_divergence()
        is_beyond = total > limit * tokens
        if is_beyond and parameters.on_kl_limit == "Stop":
            raise KlLimitError(
                f"the policy diverges from the sampler by {total / tokens:.3g} nats a token, more"
                f" than klLimit {limit:g}; the update was not applied"
            )
        return {"limited_fraction": float(is_beyond)}

    def summary(self, ranks: RankGroup, *, trained_tokens: int) -> dict[str, float]:
        """Means over the tokens of all ranks, and the tail of the mismatch; collective.

        Args:
            ranks: all ranks.
            trained_tokens: number of trained tokens of the batch.

        Returns:
            Figures by name; mismatch_current only if a token was sampled by the current weights.

        Raises:
            AssertionError: the batch went through more than one gradient pass.
        """
        values = self._gather_figures(ranks)
        passed = int(values.pop("is_trained").double().sum())
        if passed != trained_tokens:
            raise AssertionError(f"one gradient pass has {trained_tokens} tokens, not {passed}")
        weights = values.pop("weight").double()
        current = values["mismatch"][values.pop("is_current") > 0].double()
        rho = values.pop("rho").double()
        means = {name: _weighted_mean(v.double(), weights) for name, v in values.items()}
        if "correction" in values:
            means["masked_fraction"] = _weighted_mean((values["correction"] == 0).double(), weights)
        if len(current):
            means["mismatch_current"] = float(current.mean())
        return means | {
            "current_tokens": len(current),
            "effective_sample_size": effective_sample_size(rho, weights),
            "mismatch_p99": _weighted_quantile(values["mismatch"], weights, share=0.99),
            "mismatch_max": float(values["mismatch"].max()) if len(weights) else 0.0,
        }

    def _gather_figures(self, ranks: RankGroup) -> dict[str, Tensor]:
        """Gather the figures of all ranks by name, in one exchange. [N] of all ranks each."""
        names = ["entropy", "mismatch", "mismatch_k3", "clipped", "weight"]
        names += ["is_current", "is_trained", "rho"]
        names += ["correction"] if self._is_weighted else []
        names += ["reference_kl"] if self.reference is not None else []
        # A rank without tokens has no figures.
        columns = [torch.cat([torch.zeros(0), *self.figures.get(name, ())]) for name in names]
        table = ranks.gather_rows(torch.stack(columns, dim=1))
        return {name: table[:, place].contiguous() for place, name in enumerate(names)}

    @property
    def _is_weighted(self) -> bool:
        """True if a weight multiplies the surrogate of each token."""
        parameters = self.algorithm.parameters
        return parameters.token_correction.kind != "None" or parameters.opsm_delta is not None

    def _correction(self, proximal: Tensor, microbatch: Microbatch) -> Tensor | None:
        """Weight of each token; None if there is none. [N]."""
        parameters = self.algorithm.parameters
        weights = correction_weights(
            proximal,
            microbatch.sampler_logprobs,
            correction=parameters.token_correction,
            sequence_log_rho=microbatch.sequence_log_rho,
        )
        if parameters.opsm_delta is None:
            return weights
        mask = off_policy_mask(
            microbatch.sequence_log_rho, microbatch.advantages, delta=parameters.opsm_delta
        )
        return mask if weights is None else mask * weights

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


def effective_sample_size(rho: Tensor, weights: Tensor) -> float:
    """Share of the tokens that weigh as much as all of them do by rho; 1 without tokens.

    (sum of rho)^2 / (tokens * sum of rho^2): 1 if the policy is the sampler's.
    """
    if not len(rho):
        return 1.0
    total, squares = (weights * rho).sum(), (weights * rho**2).sum()
    return float(total**2 / (weights.sum() * squares))


def _weighted_mean(values: Tensor, weights: Tensor) -> float:
    """Mean of values that stand for several tokens each; 0 without values. [N], [N]."""
    return float((values * weights).sum() / weights.sum()) if len(values) else 0.0


def _weighted_quantile(values: Tensor, weights: Tensor, *, share: float) -> float:
    """Smallest value that this share of all tokens does not exceed; 0 without values."""
    if not len(values):
        return 0.0
    order = values.argsort()
    reached = weights[order].cumsum(0)
    index = int(torch.searchsorted(reached, share * reached[-1]))
    return float(values[order[min(index, len(order) - 1)]])
