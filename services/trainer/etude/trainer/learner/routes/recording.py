"""Experts that the routers choose in a pass without gradient, to be replayed in later ones.

A rank holds those of the tokens that it computes, so later passes must have the same rows: they are
planned alike then, and each rank gets its own again.
Shapes: T tokens of a row, M layers with experts, k choices of a token.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from etude.common.routed_experts import ExpertIds
from etude.trainer.learner.rows import TrainingRow
from etude.trainer.learner.sequence_packing import Microbatch
from etude.trainer.model.experts.expert_parallel import count_experts
from etude.trainer.model.policy import Policy


class RouteRecording:
    """Experts of one pass over rows, whose numbers are their places."""

    def __init__(self, policy: Policy) -> None:
        """Begin a recording.

        Args:
            policy: with routers.
        """
        shape = policy.routers.shape
        assert shape is not None  # noqa: S101 - the phase was refused otherwise
        self._policy, self._shape = policy, shape
        is_small = count_experts(policy.config) < np.iinfo(np.uint8).max
        self._dtype = np.uint8 if is_small else np.uint16
        self._ids: dict[int, ExpertIds] = {}
        """By the numbers of the rows that this rank computes. [T, M, k] each"""

    @contextmanager
    def open(self) -> Iterator[None]:
        """Observe the routers."""
        with self._policy.routers.recording():
            yield

    def add(self, microbatch: Microbatch) -> None:
        """Add the experts of a microbatch that has just gone through the policy."""
        chosen = self._policy.routers.last_choices().cpu().numpy()
        # Of several rows each is whole; one that ranks share is alone.
        begin = self._policy.context.own_tokens(microbatch.token_ids.shape[1]).start
        rows = zip(microbatch.numbers, microbatch.starts, microbatch.sizes, strict=True)
        for number, start, size in rows:
            ids = np.full((size, *self._shape), np.iinfo(self._dtype).max, self._dtype)
            low, high = max(start, begin), min(start + size, begin + len(chosen))
            if low < high:
                ids[low - start : high - start] = chosen[low - begin : high - begin]
            self._ids[number] = ids

    def finish(self, rows: Sequence[TrainingRow]) -> list[TrainingRow]:
        """The rows of the pass, those that this rank computes with their experts."""
        return [replace(row, routes=self._ids.get(place)) for place, row in enumerate(rows)]
