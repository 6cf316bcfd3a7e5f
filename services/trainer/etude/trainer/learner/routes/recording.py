"""Experts that the routers choose in a pass without gradient, to be replayed in later ones.

Shapes: T tokens of a row, M layers with experts, k choices of a token.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch

from etude.trainer.learner.rows import TrainingRow
from etude.trainer.learner.sequence_packing import Microbatch
from etude.trainer.model.fsdp import RankGroup
from etude.trainer.model.policy import Policy


class RouteRecording:
    """Experts of one pass over rows, whose numbers are their places."""

    def __init__(self, policy: Policy, rows: Sequence[TrainingRow]) -> None:
        """Begin a recording.

        Args:
            policy: with routers.
            rows: of all ranks, at least one.
        """
        shape = policy.routers.shape
        assert shape is not None  # noqa: S101 - the phase was refused otherwise
        self._policy, self._rows = policy, rows
        self._ends = np.cumsum([row.token_ids.size for row in rows])
        self._ids = torch.zeros((int(self._ends[-1]), *shape), dtype=torch.int32)

    @contextmanager
    def open(self) -> Iterator[None]:
        """Observe the routers."""
        with self._policy.routers.recording():
            yield

    def add(self, microbatch: Microbatch) -> None:
        """Add the experts of a microbatch that has just gone through the policy."""
        chosen = self._policy.routers.last_choices().int().cpu()
        # Of several rows each is whole; one that ranks share is alone.
        begin = self._policy.context.own_tokens(microbatch.token_ids.shape[1]).start
        for number, start in zip(microbatch.numbers, microbatch.starts, strict=True):
            size = self._rows[number].token_ids.size
            low, high = max(start, begin), min(start + size, begin + len(chosen))
            if low < high:
                place = int(self._ends[number]) - size + low - start
                self._ids[place : place + high - low] = chosen[low - begin : high - begin]

    def finish(self, ranks: RankGroup) -> list[TrainingRow]:
        """The rows with their experts; collective."""
        # A token is in one microbatch of one rank, and 0 on all others.
        ids = ranks.total(self._ids).numpy().astype(np.uint16)
        parts = np.split(ids, self._ends[:-1])
        return [replace(row, routes=own) for row, own in zip(self._rows, parts, strict=True)]
