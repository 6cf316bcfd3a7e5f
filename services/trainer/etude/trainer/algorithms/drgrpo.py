"""Dr. GRPO: no division by standard deviation or length, so that neither can bias the gradient.

A = R - group mean, the clipped ratio, and a constant denominator: with B rollouts,

    loss = -1 / (B * lossScale) * sum over rollouts i and tokens t of
            min(r_it A_i, clip(r_it, 1 - clipLow, 1 + clipHigh) A_i)

Source: https://arxiv.org/abs/2503.20783.
"""

from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from etude.common.api.run.algorithms import DrGRPOParameters
from etude.trainer.algorithms import advantages as estimators
from etude.trainer.algorithms import aggregation, losses
from etude.trainer.algorithms.advantages import Flags, Groups, Reals
from etude.trainer.algorithms.aggregation import Counts
from etude.trainer.algorithms.base import AlgorithmSteps
from etude.trainer.algorithms.tokens import TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class DrGRPO(AlgorithmSteps):
    """Dr. GRPO."""

    parameters: DrGRPOParameters
    loss_scale: float

    @override
    def advantages(self, rewards: Reals, *, groups: Groups, valid: Flags) -> Reals:
        return estimators.centred_rewards(rewards, groups=groups, valid=valid)

    @override
    def token_weights(self, trained: Counts) -> Reals:
        return aggregation.constant_weights(trained, scale=self.loss_scale)

    @override
    def surrogate(self, tokens: TokenLogprobs, *, advantages: Tensor) -> losses.Surrogate:
        return losses.ppo_clip(
            tokens.logprobs,
            anchor=tokens.anchor,
            advantages=advantages,
            low=self.parameters.clip_low,
            high=self.parameters.clip_high,
        )
