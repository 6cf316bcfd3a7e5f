"""How long steps wait for their rollouts, and how much those sample."""

from collections.abc import Iterable
from dataclasses import dataclass

from etude.v1 import journal_pb2, run_pb2

EWMA = 0.3
"""Weight of the newest step: three of them are most of the figure."""


@dataclass(slots=True)
class Throughput:
    """Smoothed figures of the newest reinforcement-learning steps."""

    tokens: float = 0.0
    wait_s: float = 0.0
    work_s: float = 0.0

    def stepped(
        self, records: Iterable[journal_pb2.JournalRollout], *, waited_s: float, worked_s: float
    ) -> None:
        """A step is done.

        Args:
            records: what it was trained on.
            waited_s: for its rollouts; 0 of a step that is repeated from the journal, which says
                nothing of engines.
            worked_s: for the rest of it.
        """
        if waited_s <= 0:
            return
        tokens = float(sum(record.rollout.costs.completion_tokens for record in records))
        weight = EWMA if self.tokens else 1.0
        self.tokens += weight * (tokens - self.tokens)
        self.wait_s += weight * (waited_s - self.wait_s)
        self.work_s += weight * (worked_s - self.work_s)

    def tell(self, status: run_pb2.RunStatus) -> None:
        """Write the figures into a report."""
        status.step_tokens, status.wait_seconds = self.tokens, self.wait_s
        status.work_seconds = self.work_s
