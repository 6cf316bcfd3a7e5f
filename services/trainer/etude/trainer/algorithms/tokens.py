"""Log-probs of trained tokens that a surrogate loss is made of.

Shapes: N trained tokens.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Trained tokens of one microbatch; only logprobs have a gradient."""

    logprobs: Tensor
    """Of the trainer. [N]"""
    proximal: Tensor
    """Of the trainer before the batch's first update. [N]"""
    sampler: Tensor
    """Recorded at sampling. [N]"""
    is_corrected: bool
    """True if a correction weighs the tokens for their sampler."""
    sequence_log_ratio: Tensor
    """Mean of log-prob minus anchor over all trained tokens of the token's rollout; empty for
    algorithms that do not read it. [N]"""

    @property
    def anchor(self) -> Tensor:
        """Log-probs that the importance ratio is to. [N]."""
        return self.proximal if self.is_corrected else self.sampler
