"""Gradients of the product's own objective with respect to log-probs, in float64.

Shapes: B rollouts, T tokens of the longest, N trained tokens.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from etude.common.api.run.phases import Algorithm
from etude.trainer.algorithms.base import AlgorithmSteps
from etude.trainer.algorithms.registry import build_algorithm
from etude.trainer.learner.objective import PolicyObjective
from etude.trainer.learner.rows import TrainingRow
from etude.trainer.learner.sequence_packing import collate
from etude.trainer.model.output_head import TokenScores
from oracles_bench.cases import Case, Formula


class Batch(NamedTuple):
    """A case as an algorithm sees it."""

    gradient: Tensor
    """0 where no token is trained. [B, T]"""
    advantages: Tensor
    """Of the rollouts. [B]"""


def prepare(case: Case, formula: Formula) -> Case:
    """Give a case the log-probs that a formula is about."""
    if formula.is_first_update:
        return case._replace(proximal=case.logprobs)
    return case if formula.is_corrected else case._replace(sampler=case.proximal)


def compute_gradient(case: Case, formula: Formula) -> Batch:
    """Gradient of the loss of a case, by the code that trains."""
    algorithm = build_algorithm(
        Algorithm.model_validate({"name": formula.algorithm, "parameters": formula.parameters}),
        max_tokens=case.mask.shape[1],
    )
    advantages = _advantages(case, algorithm)
    counts = case.mask.sum(1).numpy()
    weights = torch.from_numpy(algorithm.token_weights(counts))
    rows, places = case.mask.nonzero(as_tuple=True)
    logprobs = case.logprobs.clone().requires_grad_()
    tokens = logprobs[rows, places]
    proximal, sampler = (each[rows, places] for each in (case.proximal, case.sampler))
    is_corrected = algorithm.parameters.token_correction.kind != "None"
    anchor = proximal if is_corrected else sampler
    microbatch = replace(
        collate(_build_rows(case), device=torch.device("cpu")),
        # The learner's are float32.
        weights=weights[rows],
        advantages=advantages[rows],
        sampler_logprobs=sampler,
        proximal_logprobs=proximal,
        sequence_log_rho=_rollout_mean(proximal - sampler, rows, counts),
        sequence_log_ratio=_rollout_mean(tokens.detach() - anchor, rows, counts),
    )
    objective = PolicyObjective(algorithm=algorithm, reference=None)
    loss = objective(TokenScores(tokens, torch.zeros_like(tokens)), microbatch)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return Batch(gradient, advantages)


def _build_rows(case: Case) -> list[TrainingRow]:
    """One row for each rollout, with the places of its trained tokens."""
    found = []
    for mask in case.mask.numpy():
        places = np.flatnonzero(mask)
        none = np.zeros(places.size, dtype=np.float32)
        found.append(
            TrainingRow(
                token_ids=np.zeros(mask.size, dtype=np.int32),
                places=places,
                weights=none,
                advantages=none,
                sampler_logprobs=none,
                is_current=none.astype(np.bool_),
            )
        )
    return found


def _advantages(case: Case, algorithm: AlgorithmSteps) -> Tensor:
    if case.rewards is None or case.groups is None:
        return case.advantages
    valid = np.ones(len(case.rewards), dtype=np.bool_)
    found = algorithm.advantages(case.rewards.numpy(), groups=case.groups.numpy(), valid=valid)
    return torch.from_numpy(found)


def _rollout_mean(values: Tensor, rows: Tensor, counts: np.ndarray) -> Tensor:
    """Mean over the rollout of each token. [N], [N], [B] -> [N]."""
    sums = torch.zeros(len(counts), dtype=values.dtype).index_add(0, rows, values)
    return (sums / torch.from_numpy(counts).clamp(min=1))[rows]
