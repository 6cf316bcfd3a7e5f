"""Decoupled PPO: clipped about the weights before the batch, corrected for those that sampled.

    loss = -1 / N * sum over tokens of rho min(r A, clip(r, 1 - clipLow, 1 + clipHigh) A)

with r to the proximal and rho = exp(proximal - sampler log-prob), not truncated.

Source: https://arxiv.org/abs/2110.00641; for asynchronous sampling https://arxiv.org/abs/2505.24298.
"""

from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from etude.common.api.run.algorithms import DecoupledPPOParameters
from etude.trainer.algorithms import advantages as estimators
from etude.trainer.algorithms import aggregation, losses
from etude.trainer.algorithms.advantages import Flags, Groups, Reals
from etude.trainer.algorithms.aggregation import Counts
from etude.trainer.algorithms.base import AlgorithmSteps
from etude.trainer.algorithms.tokens import TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoupledPPO(AlgorithmSteps):
    """DecoupledPPO."""

    parameters: DecoupledPPOParameters

    @override
    def advantages(self, rewards: Reals, *, groups: Groups, valid: Flags) -> Reals:
        return estimators.centred_rewards(rewards, groups=groups, valid=valid)

    @override
    def token_weights(self, trained: Counts) -> Reals:
        return aggregation.global_token_weights(trained)

    @override
    def surrogate(self, tokens: TokenLogprobs, *, advantages: Tensor) -> losses.Surrogate:
        surrogate = losses.ppo_clip(
            tokens.logprobs,
            anchor=tokens.proximal,
            advantages=advantages,
            low=self.parameters.clip_low,
            high=self.parameters.clip_high,
        )
        rho = losses.importance_ratio(tokens.proximal, tokens.sampler)
        return surrogate._replace(values=rho * surrogate.values)
