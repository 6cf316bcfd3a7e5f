"""Lengths of trained and of lost rollouts: lost work that is longer than usual is a bias."""

from pydantic import BaseModel, ConfigDict

from etude.v1 import journal_pb2


class LengthTotals(BaseModel):
    """Numbers of rollouts with tokens that the policy sampled, and these tokens."""

    model_config = ConfigDict(extra="forbid")

    trained: int = 0
    trained_tokens: int = 0
    lost: int = 0
    """Dropped, or redrawn."""
    lost_tokens: int = 0

    def add_trained(self, record: journal_pb2.JournalRollout) -> None:
        """Count a rollout of a batch."""
        self.trained += 1
        self.trained_tokens += record.rollout.costs.completion_tokens

    def add_lost(self, record: journal_pb2.JournalRollout) -> None:
        """Count a rollout that is dropped; one without tokens says nothing."""
        tokens = record.rollout.costs.completion_tokens
        self.lost += tokens > 0
        self.lost_tokens += tokens

    def add_redrawn(self, rollouts: int, tokens: int) -> None:
        """Count rollouts that begin again, and the tokens that they had sampled."""
        self.lost += rollouts
        self.lost_tokens += tokens

    @property
    def lost_work_length_ratio(self) -> float:
        """Mean length of lost rollouts over that of trained ones; 0 while there are none."""
        if not self.lost or not self.trained_tokens:
            return 0.0
        return (self.lost_tokens / self.lost) / (self.trained_tokens / self.trained)
