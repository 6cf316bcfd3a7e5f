"""DAPO: two clip widths, and a mean over all tokens, so that long rollouts weigh by their length.

Groups of equal rewards are left out by the filter, and stay in the number of tokens; no others are
sampled in their place.

Source: https://arxiv.org/abs/2503.14476.
"""

from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from etude.common.api.run.algorithms import DAPOParameters
from etude.trainer.algorithms import advantages as estimators
from etude.trainer.algorithms import aggregation, losses
from etude.trainer.algorithms.advantages import Flags, Groups, Reals
from etude.trainer.algorithms.aggregation import Counts
from etude.trainer.algorithms.base import AlgorithmSteps
from etude.trainer.algorithms.tokens import TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class DAPO(AlgorithmSteps):
    """DAPO."""

    parameters: DAPOParameters

    @override
    def advantages(self, rewards: Reals, *, groups: Groups, valid: Flags) -> Reals:
        return estimators.normalised_rewards(rewards, groups=groups, valid=valid)

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
