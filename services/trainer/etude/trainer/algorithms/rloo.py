"""RLOO: leave-one-out baseline, which keeps the policy gradient unbiased.

Source: https://arxiv.org/abs/2402.14740.
"""

from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from etude.common.api.run.algorithms import RLOOParameters
from etude.trainer.algorithms import advantages as estimators
from etude.trainer.algorithms import aggregation, losses
from etude.trainer.algorithms.advantages import Flags, Groups, Reals
from etude.trainer.algorithms.aggregation import Counts
from etude.trainer.algorithms.base import AlgorithmSteps
from etude.trainer.algorithms.tokens import TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class RLOO(AlgorithmSteps):
    """RLOO."""

    parameters: RLOOParameters
    loss_scale: float

    @override
    def advantages(self, rewards: Reals, *, groups: Groups, valid: Flags) -> Reals:
        return estimators.leave_one_out(rewards, groups=groups, valid=valid)

    @override
    def token_weights(self, trained: Counts) -> Reals:
        return aggregation.constant_weights(trained, scale=self.loss_scale)

    @override
    def surrogate(self, tokens: TokenLogprobs, *, advantages: Tensor) -> losses.Surrogate:
        return losses.policy_gradient(tokens.logprobs, anchor=tokens.anchor, advantages=advantages)
