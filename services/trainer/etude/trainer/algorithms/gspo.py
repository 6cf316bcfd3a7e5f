"""GSPO: one importance ratio for a whole rollout, over all its links.

A = R - group mean; with the log-ratio of a rollout as the mean over its trained tokens,

    loss = -1 / B * sum over rollouts of min(s A, clip(s, 1 - clipLow, 1 + clipHigh) A)

The paper divides A by the standard deviation, which amplifies the noise of nearly equal groups.

Source: https://arxiv.org/abs/2507.18071.
"""

from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from etude.common.api.run.algorithms import GSPOParameters
from etude.trainer.algorithms import advantages as estimators
from etude.trainer.algorithms import aggregation, losses
from etude.trainer.algorithms.advantages import Flags, Groups, Reals
from etude.trainer.algorithms.aggregation import Counts
from etude.trainer.algorithms.base import AlgorithmSteps
from etude.trainer.algorithms.tokens import TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class GSPO(AlgorithmSteps):
    """GSPO."""

    parameters: GSPOParameters

    @override
    def advantages(self, rewards: Reals, *, groups: Groups, valid: Flags) -> Reals:
        return estimators.centred_rewards(rewards, groups=groups, valid=valid)

    @override
    def token_weights(self, trained: Counts) -> Reals:
        return aggregation.rollout_mean_weights(trained)

    @property
    @override
    def has_sequence_ratio(self) -> bool:
        return True

    @override
    def surrogate(self, tokens: TokenLogprobs, *, advantages: Tensor) -> losses.Surrogate:
        return losses.sequence_clip(
            tokens.logprobs,
            log_ratio=tokens.sequence_log_ratio,
            advantages=advantages,
            low=self.parameters.clip_low,
            high=self.parameters.clip_high,
        )
