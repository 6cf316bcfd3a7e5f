"""Log-probs of whole rollouts: by the weights before a batch's updates, and before each of them.

A rollout may lie in several rows, on several ranks. Means over it come from passes without gradient
over all of its rows, so that no cut into microbatches, ranks or links changes them.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from etude.trainer.algorithms.base import AlgorithmSteps
from etude.trainer.learner.batches import Floats, PolicyBatch
from etude.trainer.learner.divergence import Losses
from etude.trainer.learner.objective import Objective, Reference
from etude.trainer.learner.routes.recording import RouteRecording
from etude.trainer.learner.rows import TrainingRow, penalise_rollouts
from etude.trainer.learner.sequence_packing import Microbatch
from etude.trainer.model.fsdp import RankGroup, reshard_parameters
from etude.trainer.model.output_head import TokenScores
from etude.trainer.model.policy import Policy


def needs_proximal(algorithm: AlgorithmSteps) -> bool:
    """True if the gradient pass alone does not have the log-probs before the updates.

    With several updates the weights have moved; quantities of a whole rollout are in no microbatch.
    """
    parameters = algorithm.parameters
    return (
        parameters.updates_per_batch > 1
        or algorithm.has_sequence_ratio
        or parameters.opsm_delta is not None
        or parameters.token_correction.kind == "SequenceMaskTIS"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RowScorer:
    """Adds to rows what the weights of the moment give; every method is collective."""

    policy: Policy
    algorithm: AlgorithmSteps
    losses: Losses
    """Of this rank's microbatches."""
    ranks: RankGroup
    """All ranks."""

    def add_proximal(self, rows: Sequence[TrainingRow]) -> list[TrainingRow]:
        """Add log-probs before the updates where they are needed; the weights have not moved yet.

        Args:
            rows: of whole rollouts.
        """
        if not rows or not needs_proximal(self.algorithm):
            return list(rows)
        if self.policy.routers.recomputes:
            rows, proximal = self._record_routes(rows)
        else:
            proximal = self.score_rows(rows)
        log_rho = [
            logprobs - row.sampler_logprobs for row, logprobs in zip(rows, proximal, strict=True)
        ]
        scored = [
            replace(row, proximal_logprobs=logprobs, sequence_log_rho=mean)
            for row, logprobs, mean in zip(
                rows, proximal, rollout_means(rows, log_rho), strict=True
            )
        ]
        return self._add_ratio(scored, proximal)

    def add_current(self, rows: Sequence[TrainingRow], *, update: int) -> list[TrainingRow]:
        """Add the ratio of whole rollouts by the weights that an update starts from.

        Args:
            rows: of the update, with proximal log-probs.
            update: its number; the first starts from the proximal weights.
        """
        if update == 0 or not self.algorithm.has_sequence_ratio or not rows:
            return list(rows)
        return self._add_ratio(rows, self.score_rows(rows))

    def _add_ratio(
        self, rows: Sequence[TrainingRow], current: Sequence[Floats]
    ) -> list[TrainingRow]:
        if not self.algorithm.has_sequence_ratio:
            return list(rows)
        is_corrected = self.algorithm.parameters.token_correction.kind != "None"
        log_ratio = [
            logprobs - (row.proximal_logprobs if is_corrected else row.sampler_logprobs)
            for row, logprobs in zip(rows, current, strict=True)
        ]
        means = rollout_means(rows, log_ratio)
        return [
            replace(row, sequence_log_ratio=mean) for row, mean in zip(rows, means, strict=True)
        ]

    def _record_routes(self, rows: Sequence[TrainingRow]) -> tuple[list[TrainingRow], list[Floats]]:
        """Record experts and log-probs, of each update's rows apart.

        A pass of an update has the same rows, and so each rank the same microbatches.
        """
        routed, logprobs = list(rows), [np.zeros(0, dtype=np.float32)] * len(rows)
        for update in sorted({row.update for row in rows}):
            places = [place for place, row in enumerate(rows) if row.update == update]
            own = [rows[place] for place in places]
            recording = RouteRecording(self.policy)
            values = self._record(own, lambda scores, _: scores.logprobs, recording)
            for place, row, found in zip(places, recording.finish(own), values, strict=True):
                routed[place], logprobs[place] = row, found
        return routed, logprobs

    def score_rows(self, rows: Sequence[TrainingRow]) -> list[Floats]:
        """Log-probs of the trained tokens of each row by the present weights."""
        return self._record(rows, lambda scores, _: scores.logprobs)

    def penalise(
        self, rows: Sequence[TrainingRow], batch: PolicyBatch, reference: Reference
    ) -> tuple[list[TrainingRow], float]:
        """Subtract the divergence of each rollout from its reward, and compare rewards again.

        Args:
            rows: of whole groups, at least one.
            batch: they are of.
            reference: scores tokens by the weights at the start of the phase.

        Returns:
            The rows with new advantages, and the mean log-ratio of a token.
        """
        log_ratio = self._record(rows, lambda scores, batch: scores.logprobs - reference(batch))
        sums: NDArray[np.float64] = np.bincount(
            [row.rollout for row in rows],
            weights=[float(values.sum(dtype=np.float64)) for values in log_ratio],
            minlength=len(batch.rewards),
        ).astype(np.float64)
        penalties = self.algorithm.parameters.kl_coefficient * sums
        mean = float(sums.sum()) / sum(values.size for values in log_ratio)
        return penalise_rollouts(rows, batch, penalties, self.algorithm), mean

    @torch.no_grad()
    def _record(
        self,
        rows: Sequence[TrainingRow],
        value_of: Objective,
        recording: RouteRecording | None = None,
    ) -> list[Floats]:
        """Record a value of each trained token of each row, in a pass without gradient."""
        ends = np.cumsum([row.places.size for row in rows])
        numbered = [
            replace(row, number=number, tokens=np.arange(end - row.places.size, end))
            for number, (row, end) in enumerate(zip(rows, ends, strict=True))
        ]
        found = torch.zeros(int(ends[-1]), dtype=torch.float32)

        def record(scores: TokenScores, microbatch: Microbatch) -> Tensor:
            if recording is not None:
                recording.add(microbatch)
            values = value_of(scores, microbatch)
            found[microbatch.tokens.cpu()] = values.float().cpu()
            return values.sum()

        with contextlib.nullcontext() if recording is None else recording.open():
            for _ in self.losses(numbered, record):  # each is one forward pass
                pass
        reshard_parameters(self.policy)
        # A token is in one microbatch of one rank, and 0 on all others.
        return np.split(self.ranks.total(found).numpy(), ends[:-1])


def rollout_means(rows: Sequence[TrainingRow], values: Sequence[Floats]) -> list[Floats]:
    """Mean over all trained tokens of each row's rollout, once for each token of the row.

    Args:
        rows: of whole rollouts.
        values: of the trained tokens of each row. [N] each
    """
    rollouts = np.array([row.rollout for row in rows])
    sums = np.bincount(rollouts, weights=[float(v.sum(dtype=np.float64)) for v in values])
    counts = np.bincount(rollouts, weights=[v.size for v in values])
    means = sums / np.maximum(counts, 1)
    return [
        np.full(v.size, means[rollout], dtype=np.float32)
        for rollout, v in zip(rollouts, values, strict=True)
    ]
