"""Bounded staleness: admission of groups, and the choice of the next batch by deadline.

Versions and the trainer are counted by the batches that are trained into them. Staleness counts in
positions: versions along the accepted chain, one for every N batches; a version that a take-over
publishes between two of them has the position of the earlier one. A deadline is the last number of
batches at which a group may be trained. With P groups per batch, admission lets at most P·(D + 1)
groups ever have a deadline of D or earlier, so a schedule without a late group exists; the batch
rule keeps it reachable.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StalenessBound:
    """Staleness bound of a phase; Sync is the bound 0."""

    groups_per_step: int
    max_staleness: int
    """Positions between the oldest version that touched a token and the trainer's at its batch."""
    steps_per_version: int = 1
    """Batches from one version to the next."""

    def __post_init__(self) -> None:
        if self.groups_per_step < 1:
            raise ValueError(f"groups_per_step must be >= 1, got {self.groups_per_step}")
        if self.max_staleness < 0:
            raise ValueError(f"max_staleness must be >= 0, got {self.max_staleness}")
        if self.steps_per_version < 1:
            raise ValueError(f"steps_per_version must be >= 1, got {self.steps_per_version}")

    def staleness(self, oldest: int, *, trainer: int) -> int:
        """Positions from the oldest version that touched a group's tokens to the trainer's."""
        return trainer // self.steps_per_version - oldest // self.steps_per_version

    def can_admit(self, groups: int, *, serving: int) -> bool:
        """True if one more group may start.

        Args:
            groups: groups trained and groups live; dropped ones do not count.
            serving: batches in the oldest version that a replica in rotation still serves.
        """
        return groups < self.groups_per_step * (self.deadline(serving) + 1)

    def deadline(self, oldest: int) -> int:
        """Deadline of a group: the most batches that the trainer may have trained before it.

        Args:
            oldest: batches in the oldest version that touched its tokens; without tokens yet, in
                the serving version.
        """
        position = oldest // self.steps_per_version + self.max_staleness
        return (position + 1) * self.steps_per_version - 1

    def steps_left(self, trainer: int) -> int:
        """Steps that may come before the last one that may train a group of today's weights."""
        return self.deadline(trainer) - trainer

    def is_late(self, deadline: int, *, trainer: int) -> bool:
        """True if a group can no longer be trained within the bound."""
        return deadline < trainer

    def is_reachable(self, due: Iterable[tuple[int, int]], *, trainer: int) -> bool:
        """True if the batches after the next one can train every group in time.

        Args:
            due: deadlines in ascending order, each with its number of groups.
            trainer: batches trained so far.
        """
        total = 0
        for deadline, groups in due:
            total += groups
            if groups and self.excess(total, deadline, trainer=trainer):
                return False
        return True

    def excess(self, groups: int, deadline: int, *, trainer: int) -> int:
        """Groups with this deadline or an earlier one for which there is no batch in time.

        Args:
            groups: that many there are, without those of the next batch.
            deadline: of the last of them.
            trainer: batches trained so far.
        """
        return max(0, groups - self.groups_per_step * max(0, deadline - trainer))
