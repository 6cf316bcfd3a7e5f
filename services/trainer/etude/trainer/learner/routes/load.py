"""Load of experts: tokens that each expert computes in the gradient passes of an update.

Shapes: M layers with experts, E experts of a layer.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from etude.trainer.learner.objective import Objective
from etude.trainer.learner.sequence_packing import Microbatch
from etude.trainer.model.experts.expert_parallel import count_experts
from etude.trainer.model.fsdp import RankGroup
from etude.trainer.model.output_head import TokenScores
from etude.trainer.model.policy import Policy


class ExpertLoad:
    """Counts the tokens of each expert by its routers' choices, replayed ones as they are replayed.

    Padding is left out. Passes that checkpointing computes again are not counted again, as choices
    are read between the forward and the backward pass.
    """

    def __init__(self, policy: Policy, ranks: RankGroup) -> None:
        """Start from 0.

        Args:
            policy: one without routers whose choices can be read has no load.
            ranks: all of them.
        """
        self._policy, self._ranks = policy, ranks
        shape = policy.routers.shape
        size = (0, 0) if shape is None else (shape.layers, count_experts(policy.config))
        self._tokens = torch.zeros(size, dtype=torch.int64, device=ranks.device)
        """Of this rank. [M, E]"""

    @contextmanager
    def counting(self, objective: Objective) -> Iterator[Objective]:
        """Count the passes that an objective is given."""
        if self._policy.routers.shape is None:
            yield objective
            return

        def count_and_score(scores: TokenScores, microbatch: Microbatch) -> Tensor:
            # First, as the objective may make passes of its own for reference log-probs.
            self._add(microbatch)
            return objective(scores, microbatch)

        with self._policy.routers.recording():
            yield count_and_score

    def tokens(self) -> Tensor:
        """Tokens of each expert on all ranks; collective. [M, E]."""
        return self._ranks.total(self._tokens.cpu())

    def summary(self) -> dict[str, float]:
        """Figures of the load of all ranks; collective. None without experts."""
        return {} if self._policy.routers.shape is None else load_figures(self.tokens())

    def _add(self, microbatch: Microbatch) -> None:
        chosen = self._policy.routers.last_choices()
        # Of several rows each is whole; one that ranks share is alone.
        begin = self._policy.context.own_tokens(microbatch.token_ids.shape[1]).start
        own = torch.zeros(len(chosen), dtype=torch.int64, device=chosen.device)
        for start, size in zip(microbatch.starts, microbatch.sizes, strict=True):
            own[max(0, start - begin) : max(0, start + size - begin)] = 1
        ids = chosen.long().transpose(0, 1).flatten(1)
        tokens = own.repeat_interleave(chosen.shape[2]).expand_as(ids)
        self._tokens.scatter_add_(1, ids, tokens)


def load_figures(tokens: Tensor) -> dict[str, float]:
    """Evenness of the load of experts; no figures without tokens.

    Args:
        tokens: of each expert. [M, E]

    Returns:
        The largest load over the mean one (1 if all are equal), and the entropy over that of equal
        loads (then 1, and 0 if one expert has all), each as the mean of all layers and of the
        worst one.
    """
    loads = tokens.double()
    if not loads.sum():
        return {}
    ratio = loads.amax(-1) / loads.mean(-1)
    share = loads / loads.sum(-1, keepdim=True)
    equal = torch.tensor(max(2, loads.shape[-1]), dtype=torch.float64).log()
    entropy = torch.special.entr(share).sum(-1) / equal
    return {
        "expert_load_ratio": float(ratio.mean()),
        "expert_load_ratio_worst": float(ratio.max()),
        "expert_load_entropy": float(entropy.mean()),
        "expert_load_entropy_worst": float(entropy.min()),
    }
