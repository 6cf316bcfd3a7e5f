"""Throughput: wait, work and sampled tokens of reinforcement-learning steps, smoothed."""

from collections.abc import Iterable
from dataclasses import dataclass

from etude.v1 import journal_pb2, run_pb2

EWMA = 0.3
"""Weight of the newest step: three steps make up most of a figure."""


@dataclass(slots=True)
class Throughput:
    """Smoothed figures of the newest reinforcement-learning steps."""

    tokens: float = 0.0
    wait_s: float = 0.0
    work_s: float = 0.0

    def record_step(
        self, records: Iterable[journal_pb2.JournalRollout], *, waited_s: float, worked_s: float
    ) -> None:
        """Record a step.

        Args:
            records: rollouts that it trained.
            waited_s: wait for its rollouts; 0 for a step that is replayed from the journal, which
                is not counted.
            worked_s: duration of the rest.
        """
        if waited_s <= 0:
            return
        tokens = float(sum(record.rollout.costs.completion_tokens for record in records))
        weight = EWMA if self.tokens else 1.0
        self.tokens += weight * (tokens - self.tokens)
        self.wait_s += weight * (waited_s - self.wait_s)
        self.work_s += weight * (worked_s - self.work_s)

    def write_status(self, status: run_pb2.RunStatus) -> None:
        """Write the figures into a status."""
        status.step_tokens, status.wait_seconds = self.tokens, self.wait_s
        status.work_seconds = self.work_s
