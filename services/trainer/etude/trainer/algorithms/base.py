"""Interface of a policy-gradient algorithm."""

from typing import Protocol

from torch import Tensor

from etude.common.api.run.algorithms import AlgorithmParameters
from etude.trainer.algorithms.advantages import Flags, Groups, Reals
from etude.trainer.algorithms.aggregation import Counts
from etude.trainer.algorithms.losses import Surrogate
from etude.trainer.algorithms.tokens import TokenLogprobs


class AlgorithmSteps(Protocol):
    """The three choices that distinguish algorithms."""

    @property
    def parameters(self) -> AlgorithmParameters: ...

    def advantages(self, rewards: Reals, *, groups: Groups, valid: Flags) -> Reals:
        """Advantage of each rollout; 0 without a valid sibling. [R] -> [R]."""
        ...

    def token_weights(self, trained: Counts) -> Reals:
        """Weight of one token in the loss, by the number of its rollout's tokens. [R] -> [R]."""
        ...

    @property
    def has_sequence_ratio(self) -> bool:
        """True if surrogate() reads the ratio of whole rollouts."""
        return False

    def surrogate(self, tokens: TokenLogprobs, *, advantages: Tensor) -> Surrogate:
        """Surrogate loss per token. [N] -> [N]."""
        ...
