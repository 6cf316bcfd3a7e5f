"""GRPO as published: normalised advantages, and a mean per rollout.

Both divisions bias: the first favours nearly equal groups, the second short wrong answers.

Source: https://arxiv.org/abs/2402.03300.
"""

from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from etude.common.api.run.algorithms import GRPOParameters
from etude.trainer.algorithms import advantages as estimators
from etude.trainer.algorithms import aggregation, losses
from etude.trainer.algorithms.advantages import Flags, Groups, Reals
from etude.trainer.algorithms.aggregation import Counts
from etude.trainer.algorithms.base import AlgorithmSteps
from etude.trainer.algorithms.tokens import TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class GRPO(AlgorithmSteps):
    """GRPO."""

    parameters: GRPOParameters

    @override
    def advantages(self, rewards: Reals, *, groups: Groups, valid: Flags) -> Reals:
        return estimators.normalised_rewards(rewards, groups=groups, valid=valid)

    @override
    def token_weights(self, trained: Counts) -> Reals:
        return aggregation.rollout_mean_weights(trained)

    @override
    def surrogate(self, tokens: TokenLogprobs, *, advantages: Tensor) -> losses.Surrogate:
        return losses.ppo_clip(
            tokens.logprobs,
            anchor=tokens.anchor,
            advantages=advantages,
            low=self.parameters.clip_low,
            high=self.parameters.clip_high,
        )
