"""Cuts of a batch into links, microbatches and ranks, of which none changes a gradient."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import PretrainedConfig

from etude.common.api.run.algorithms import PARAMETERS
from etude.common.api.run.phases import Algorithm
from etude.trainer.algorithms.base import AlgorithmSteps
from etude.trainer.algorithms.registry import build_algorithm
from etude.trainer.learner.batches import PolicyBatch, PolicySequence
from etude.trainer.learner.objective import Objective, PolicyObjective
from etude.trainer.learner.proximal import RowScorer
from etude.trainer.learner.rows import TrainingRow, policy_rows
from etude.trainer.learner.sequence_packing import collate
from etude.trainer.model.experts.router_replay import RouterReplay
from etude.trainer.model.fsdp import RankGroup
from etude.trainer.model.output_head import TokenScores
from etude.trainer.model.policy import Policy

CPU = torch.device("cpu")
ALONE = RankGroup(rank=0, size=1, device=CPU)
CHAIN = 8
"""Tokens of a rollout; the first of each link is context."""


@dataclass(frozen=True)
class Table:
    """A policy whose log-probs are a table: the token id is the place in it."""

    logprobs: Tensor
    per_microbatch: int
    """Rows of a microbatch."""

    def losses(self, rows: Sequence[TrainingRow], objective: Objective) -> Iterator[Tensor]:
        """Loss of each microbatch."""
        for start in range(0, len(rows), self.per_microbatch):
            microbatch = collate(rows[start : start + self.per_microbatch], device=CPU)
            tokens = self.logprobs[microbatch.token_ids[microbatch.rows, microbatch.places]]
            yield objective(TokenScores(tokens, torch.zeros_like(tokens)), microbatch)


@st.composite
def batches(draw: st.DrawFn) -> tuple[PolicyBatch, PolicyBatch]:
    """One batch, with rollouts of one link and cut into several in another order."""
    rollouts = 2 * draw(st.integers(1, 3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    whole: list[PolicySequence] = []
    cut: list[PolicySequence] = []
    for rollout in range(rollouts):
        ids = np.arange(CHAIN, dtype=np.int32) + rollout * CHAIN
        mask = rng.random(CHAIN) < draw(st.sampled_from([0.0, 0.6, 0.9]))
        mask[0] = False
        sampler = np.where(rng.random(CHAIN) < 0.1, -np.inf, -rng.random(CHAIN)).astype(np.float32)
        # A link begins with a token that is not trained.
        edges = [0, *(place for place in range(1, CHAIN) if not mask[place]), CHAIN]
        for links, places in ((whole, [0, CHAIN]), (cut, edges)):
            links.extend(
                PolicySequence(
                    token_ids=ids[a:b],
                    loss_mask=mask[a:b],
                    sampler_logprobs=sampler[a:b],
                    rollout=rollout,
                )
                for a, b in itertools.pairwise(places)
            )
    order = draw(st.permutations(range(len(cut))))
    rewards = np.round(rng.normal(size=rollouts), 1)

    def batch(links: list[PolicySequence]) -> PolicyBatch:
        return PolicyBatch(
            sequences=tuple(links),
            rewards=rewards,
            groups=np.arange(rollouts) // 2,
            valid=np.ones(rollouts, dtype=np.bool_),
        )

    return batch(whole), batch([cut[place] for place in order])


def policy_without_experts() -> Policy:
    """Stand for a policy whose passes the table computes."""
    model = nn.Module()
    model.routers = RouterReplay(model, PretrainedConfig())  # type: ignore[assignment]
    return cast("Policy", model)


def gradient(batch: PolicyBatch, chosen: AlgorithmSteps, *, per_microbatch: int) -> Tensor:
    """Gradient of each token's log-prob over all updates of a batch, the weights not moving."""
    generator = torch.Generator().manual_seed(0)
    size = len(batch.rewards) * CHAIN
    logprobs = -torch.rand(size, generator=generator, dtype=torch.float64).requires_grad_()
    table = Table(logprobs, per_microbatch)
    scorer = RowScorer(
        policy=policy_without_experts(), algorithm=chosen, losses=table.losses, ranks=ALONE
    )
    objective = PolicyObjective(algorithm=chosen, reference=None)
    scored = scorer.add_proximal(policy_rows(batch, chosen).rows)
    total = torch.zeros((), dtype=torch.float64) + 0 * logprobs.sum()
    for update in range(chosen.parameters.updates_per_batch):
        own = [row for row in scored if row.update == update]
        total = total + sum(table.losses(scorer.add_current(own, update=update), objective))
    (found,) = torch.autograd.grad(total, logprobs)
    return found


@pytest.mark.parametrize("name", list(PARAMETERS))
@settings(max_examples=15)
@given(both=batches(), per_microbatch=st.integers(1, 4))
def test_no_cut_changes_the_gradient_of_an_algorithm(
    name: str, both: tuple[PolicyBatch, PolicyBatch], per_microbatch: int
) -> None:
    chosen = build_algorithm(Algorithm.model_validate({"name": name}), max_tokens=CHAIN)
    expected, found = (gradient(batch, chosen, per_microbatch=per_microbatch) for batch in both)
    assert torch.isfinite(found).all()
    assert torch.allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize(
    "parameters",
    [
        {"correction": {"kind": "TIS", "high": 1.1}},
        {"correction": {"kind": "IcePop", "low": 0.9, "high": 1.1}},
        {"correction": {"kind": "SequenceMaskTIS", "low": 0.9, "high": 1.1}},
        {"opsmDelta": 0.05},
        {"logRatioPenalty": 0.1},
        {"updatesPerBatch": 2, "correction": {"kind": "TIS", "high": 1.1}, "clipHigh": 0.1},
    ],
)
@settings(max_examples=10)
@given(both=batches(), per_microbatch=st.integers(1, 4))
def test_no_cut_changes_what_a_correction_does(
    parameters: dict[str, Any], both: tuple[PolicyBatch, PolicyBatch], per_microbatch: int
) -> None:
    given_algorithm = Algorithm.model_validate({"name": "DrGRPO", "parameters": parameters})
    chosen = build_algorithm(given_algorithm, max_tokens=CHAIN)
    expected, found = (gradient(batch, chosen, per_microbatch=per_microbatch) for batch in both)
    assert torch.isfinite(found).all()
    assert torch.allclose(found, expected, atol=1e-6)
