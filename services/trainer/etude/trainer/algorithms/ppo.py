"""PPO's clipped surrogate without a critic: the baseline is the mean of the group.

A = R - group mean, and with N trained tokens in the batch

    loss = -1 / N * sum over tokens of min(r A, clip(r, 1 - clipLow, 1 + clipHigh) A)

Source: https://arxiv.org/abs/1707.06347.
"""

from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from etude.common.api.run.algorithms import PPOParameters
from etude.trainer.algorithms import advantages as estimators
from etude.trainer.algorithms import aggregation, losses
from etude.trainer.algorithms.advantages import Flags, Groups, Reals
from etude.trainer.algorithms.aggregation import Counts
from etude.trainer.algorithms.base import AlgorithmSteps
from etude.trainer.algorithms.tokens import TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class PPO(AlgorithmSteps):
    """PPO."""

    parameters: PPOParameters

    @override
    def advantages(self, rewards: Reals, *, groups: Groups, valid: Flags) -> Reals:
        return estimators.centred_rewards(rewards, groups=groups, valid=valid)

    @override
    def token_weights(self, trained: Counts) -> Reals:
        return aggregation.global_token_weights(trained)

    @override
    def surrogate(self, tokens: TokenLogprobs, *, advantages: Tensor) -> losses.Surrogate:
        return losses.ppo_clip(
            tokens.logprobs,
            anchor=tokens.anchor,
            advantages=advantages,
            low=self.parameters.clip_low,
            high=self.parameters.clip_high,
        )
