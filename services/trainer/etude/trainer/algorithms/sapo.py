"""SAPO: a sigmoid of the importance ratio in the place of a clip.

Source: https://arxiv.org/abs/2511.20347.
"""

from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from etude.common.api.run.algorithms import SAPOParameters
from etude.trainer.algorithms import advantages as estimators
from etude.trainer.algorithms import aggregation, losses
from etude.trainer.algorithms.advantages import Flags, Groups, Reals
from etude.trainer.algorithms.aggregation import Counts
from etude.trainer.algorithms.base import AlgorithmSteps
from etude.trainer.algorithms.tokens import TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class SAPO(AlgorithmSteps):
    """SAPO."""

    parameters: SAPOParameters

    @override
    def advantages(self, rewards: Reals, *, groups: Groups, valid: Flags) -> Reals:
        return estimators.centred_rewards(rewards, groups=groups, valid=valid)

    @override
    def token_weights(self, trained: Counts) -> Reals:
        return aggregation.rollout_mean_weights(trained)

    @override
    def surrogate(self, tokens: TokenLogprobs, *, advantages: Tensor) -> losses.Surrogate:
        return losses.soft_gate(
            tokens.logprobs,
            anchor=tokens.anchor,
            advantages=advantages,
            temperature_positive=self.parameters.temperature_positive,
            temperature_negative=self.parameters.temperature_negative,
        )
