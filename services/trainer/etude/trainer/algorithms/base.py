"""What an algorithm consists of."""

from typing import Protocol

from torch import Tensor

from etude.common.api.algorithms import Parameters
from etude.trainer.advantages import Flags, Groups, Reals
from etude.trainer.aggregation import Counts
from etude.trainer.losses import Surrogate


class AlgorithmSteps(Protocol):
    """The three choices that tell algorithms apart."""

    @property
    def parameters(self) -> Parameters: ...

    def advantages(self, rewards: Reals, *, groups: Groups, valid: Flags) -> Reals:
        """One per rollout; 0 without a valid sibling. [R] -> [R]."""
        ...

    def token_weights(self, trained: Counts) -> Reals:
        """What one token counts in the loss, by its rollout's number of them. [R] -> [R]."""
        ...

    def surrogate(self, logprobs: Tensor, *, anchor: Tensor, advantages: Tensor) -> Surrogate:
        """What to minimise, per token. [N] -> [N]."""
        ...
