"""Training rows: each sequence of a batch with the loss weights of its tokens, before sharding.

Shapes: T tokens and N predicted tokens of one row, R rollouts of one batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from etude.common.errors import WrongStateError
from etude.common.routed_experts import ExpertIds
from etude.trainer.algorithms import advantages
from etude.trainer.algorithms.base import AlgorithmSteps
from etude.trainer.learner.batches import (
    Bools,
    Floats,
    Ints,
    PolicyBatch,
    PolicySequence,
    SupervisedSequence,
)


def _no_values() -> Floats:
    return np.zeros(0, dtype=np.float32)


def _no_flags() -> Bools:
    return np.zeros(0, dtype=np.bool_)


def _no_numbers() -> NDArray[np.int64]:
    return np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRow:
    """One sequence and the tokens of it that are trained."""

    token_ids: Ints
    """[T]"""
    places: NDArray[np.int64]
    """Positions of the trained tokens, each at least 1. [N]"""
    weights: Floats
    """Weight of each trained token in the loss of the whole batch. [N]"""
    advantages: Floats = field(default_factory=_no_values)
    """Policy rows only. [N]"""
    sampler_logprobs: Floats = field(default_factory=_no_values)
    """Policy rows only. [N]"""
    is_current: Bools = field(default_factory=_no_flags)
    """Policy rows only: True where the weights of this step sampled the token. [N]"""
    rollout: int = 0
    """Policy rows only: its rollout's place in the batch's rewards."""
    update: int = 0
    """Policy rows only: number of the batch's update that trains it."""
    number: int = 0
    """Number of the row in a pass over several."""
    tokens: NDArray[np.int64] = field(default_factory=_no_numbers)
    """Numbers of the trained tokens in a pass over several rows; empty where nothing is recorded
    by them. [N]"""
    proximal_logprobs: Floats = field(default_factory=_no_values)
    """By the weights before the batch's updates; empty if the gradient pass has the same. [N]"""
    sequence_log_rho: Floats = field(default_factory=_no_values)
    """Mean of proximal - sampler log-prob over the rollout; empty as above. [N]"""
    sequence_log_ratio: Floats = field(default_factory=_no_values)
    """Mean of trainer log-prob - anchor over the rollout, for algorithms that read it. [N]"""
    routes: ExpertIds | None = None
    """Experts of each token where it was sampled; None if they were not recorded. [T, M, k]"""


class PolicyRows(NamedTuple):
    """A policy batch in rows, and counts of what was left out."""

    rows: list[TrainingRow]
    filtered_rows: list[TrainingRow]
    """Rows of rollouts that are left out because their advantage is 0."""
    removed: int
    """Trained tokens whose sampler log-prob was not finite."""
    filtered: int
    """Number of rollouts left out because their advantage is 0."""


def supervised_rows(sequences: Sequence[SupervisedSequence]) -> list[TrainingRow]:
    """Build rows whose weights sum to 1 over the batch; leave out sequences without weight."""
    total = sum(float(sequence.weights[1:].sum(dtype=np.float64)) for sequence in sequences)
    rows = []
    for sequence in sequences:
        places = np.flatnonzero(sequence.weights[1:]) + 1
        if places.size:
            weights = (sequence.weights[places] / total).astype(np.float32)
            rows.append(TrainingRow(token_ids=sequence.token_ids, places=places, weights=weights))
    return rows


def policy_rows(batch: PolicyBatch, algorithm: AlgorithmSteps) -> PolicyRows:
    """Build rows with advantages; the denominators count every rollout that takes part.

    A trained token whose sampler log-prob is NaN or infinite is removed: the sampler gave it no
    probability, so it has no importance ratio.

    Raises:
        WrongStateError: the batch has rollouts that were not read.
    """
    if batch.stored:
        raise WrongStateError(f"{len(batch.stored)} rollouts of the batch were not read")
    if batch.advantages is None:
        part = advantages.takes_part(batch.groups, batch.valid)
        values = algorithm.advantages(batch.rewards, groups=batch.groups, valid=batch.valid)
    else:
        part, values = batch.valid, batch.advantages
    places = [_trained_places(sequence) for sequence in batch.sequences]
    trained = np.zeros(len(batch.rewards), dtype=np.int64)
    for sequence, own in zip(batch.sequences, places, strict=True):
        trained[sequence.rollout] += own.size if part[sequence.rollout] else 0
    updates = assign_updates(batch.groups, updates=algorithm.parameters.updates_per_batch)
    weights = _update_weights(trained, updates, algorithm)
    kept = part.copy()
    if algorithm.parameters.group_filter == "NonZeroAdvantage":
        kept &= _has_signal(values, batch.groups, algorithm)
    rows: dict[bool, list[TrainingRow]] = {True: [], False: []}
    for sequence, own in zip(batch.sequences, places, strict=True):
        rollout = sequence.rollout
        if part[rollout] and own.size:
            row = _policy_row(sequence, own, weight=weights[rollout], advantage=values[rollout])
            row = replace(row, update=int(updates[rollout]))
            rows[bool(kept[rollout])].append(row)
    sampled = sum(int(s.loss_mask.sum()) for s in batch.sequences if part[s.rollout])
    return PolicyRows(
        rows[True], rows[False], sampled - int(trained.sum()), int((part & ~kept).sum())
    )


def _has_signal(
    values: NDArray[np.float64], groups: NDArray[np.int64], algorithm: AlgorithmSteps
) -> Bools:
    """Select rollouts with a part in the loss: of an advantage, or in a group that has one. [R].

    What else is in the loss acts on all siblings of a group alike.
    """
    parameters = algorithm.parameters
    selected: Bools = values != 0
    if parameters.kl_coefficient or parameters.log_ratio_penalty:
        selected = np.isin(groups, groups[selected])
    return selected


def penalise_rollouts(
    rows: Sequence[TrainingRow],
    batch: PolicyBatch,
    penalties: NDArray[np.float64],
    algorithm: AlgorithmSteps,
) -> list[TrainingRow]:
    """Give rows the advantages of rewards from which penalties are subtracted.

    Args:
        rows: of whole groups.
        batch: they are of.
        penalties: of the rollouts of these rows; 0 for others. [R]
        algorithm: of the phase.
    """
    if batch.advantages is None:
        rewards = np.where(batch.valid, batch.rewards, 0.0) - penalties
        values = algorithm.advantages(rewards, groups=batch.groups, valid=batch.valid)
    else:
        values = batch.advantages - penalties
    return [
        replace(row, advantages=np.full_like(row.advantages, values[row.rollout])) for row in rows
    ]


def assign_updates(groups: NDArray[np.int64], *, updates: int) -> NDArray[np.int64]:
    """Assign whole groups to updates, in equal shares and by their numbers. [R] -> [R].

    Siblings stay together: their advantages sum to zero, so that each update is centred.
    """
    numbers, place = np.unique(groups, return_inverse=True)
    assigned: NDArray[np.int64] = place * updates // max(1, len(numbers))
    return assigned


def _update_weights(
    trained: NDArray[np.int64], updates: NDArray[np.int64], algorithm: AlgorithmSteps
) -> NDArray[np.float64]:
    """Weight of one token of each rollout, from the totals of the rollout's update. [R]."""
    weights = np.zeros(trained.shape)
    for update in np.unique(updates):
        own = updates == update
        weights[own] = algorithm.token_weights(np.where(own, trained, 0))[own]
    return weights


def sample_rows(rows: Sequence[TrainingRow], *, tokens: int, seed: int) -> list[TrainingRow]:
    """Draw rows at random until they have this many tokens; all of them if they have fewer.

    A function of its arguments alone, so that each rank draws the same rows.
    """
    drawn: list[TrainingRow] = []
    size = 0
    for index in np.random.default_rng(seed).permutation(len(rows)):
        if size >= tokens:
            break
        drawn.append(rows[index])
        size += rows[index].token_ids.size
    return drawn


def _trained_places(sequence: PolicySequence) -> NDArray[np.int64]:
    found: NDArray[np.int64] = np.flatnonzero(
        sequence.loss_mask & np.isfinite(sequence.sampler_logprobs)
    )
    return found


def _policy_row(
    sequence: PolicySequence, places: NDArray[np.int64], *, weight: float, advantage: float
) -> TrainingRow:
    return TrainingRow(
        token_ids=sequence.token_ids,
        places=places,
        weights=np.full(places.size, weight, dtype=np.float32),
        advantages=np.full(places.size, advantage, dtype=np.float32),
        sampler_logprobs=sequence.sampler_logprobs[places],
        is_current=(
            np.zeros(places.size, dtype=np.bool_)
            if sequence.is_current is None
            else sequence.is_current[places]
        ),
        rollout=sequence.rollout,
        routes=sequence.routes,
    )
