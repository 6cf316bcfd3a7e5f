"""DPPO: the trust region is about the probability of a token and not about its ratio.

A rare token may change its ratio much while the policy hardly changes; a common one the reverse.

Source: https://arxiv.org/abs/2602.04879.
"""

from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from etude.common.api.run.algorithms import DPPOParameters
from etude.trainer.algorithms import advantages as estimators
from etude.trainer.algorithms import aggregation, losses
from etude.trainer.algorithms.advantages import Flags, Groups, Reals
from etude.trainer.algorithms.aggregation import Counts
from etude.trainer.algorithms.base import AlgorithmSteps
from etude.trainer.algorithms.tokens import TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class DPPO(AlgorithmSteps):
    """DPPO."""

    parameters: DPPOParameters

    @override
    def advantages(self, rewards: Reals, *, groups: Groups, valid: Flags) -> Reals:
        return estimators.centred_rewards(rewards, groups=groups, valid=valid)

    @override
    def token_weights(self, trained: Counts) -> Reals:
        return aggregation.global_token_weights(trained)

    @override
    def surrogate(self, tokens: TokenLogprobs, *, advantages: Tensor) -> losses.Surrogate:
        return losses.total_variation_mask(
            tokens.logprobs,
            sampler=tokens.sampler,
            advantages=advantages,
            divergence=self.parameters.divergence,
        )
