"""Slow groups: those that a full batch waits for, and what a phase does with them."""

from dataclasses import dataclass

from etude.common.api.run.async_limits import OnStale
from etude.trainer import metrics
from etude.trainer.controller.admission.buffer import RolloutBuffer
from etude.trainer.controller.admission.dropping import drop_group, drop_rollout
from etude.trainer.controller.admission.groups import RolloutGroup
from etude.trainer.controller.checkpoints.recovery import JournaledLedger
from etude.trainer.controller.reporting.reporter import RunReporter
from etude.v1 import journal_pb2

SLOW = "slow"
"""Reason to drop a group, or the finished rollouts of one that is drawn again."""


@dataclass(slots=True, kw_only=True)
class SlowGroups:
    """Carries out asyncLimits.onStale."""

    action: OnStale
    buffer: RolloutBuffer
    book: JournaledLedger
    reporter: RunReporter

    def take(self, *, trainer: int) -> list[RolloutGroup]:
        """Take groups out of the way of the next batch; their rollouts must be cancelled.

        Returns:
            The groups, which were dropped, or are live without any rollout.
        """
        if self.action == OnStale.WAIT:
            return []
        groups = self.buffer.blocking(trainer=trainer)
        if self.action == OnStale.DROP:
            for group in groups:
                drop_group(self.book, group, SLOW)
        else:
            # Without a newer version the same group would be in the way again at once.
            groups = [group for group in groups if self.buffer.has_later_deadline(group)]
            for group in groups:
                self._restart(group)
        self._report(groups)
        return groups

    def _restart(self, group: RolloutGroup) -> None:
        for index in group.valid_indices():
            drop_rollout(self.book, group, group.finished[index].rollout.rollout_id, SLOW)
        group.serving = None
        body = journal_pb2.JournalRestart(group_id=group.group_id, serving=self.buffer.serving())
        self.book.write(journal_pb2.JournalRecord(restart=body))

    def _report(self, groups: list[RolloutGroup]) -> None:
        if not groups:
            return
        metrics.SLOW_GROUPS.labels(action=self.action.value).inc(len(groups))
        done = "dropped" if self.action == OnStale.DROP else "drawn again"
        message = (
            f"{len(groups)} groups, {groups[0].group_id} first, are {done}: a full batch waited"
            f" for them. asyncLimits.onStale {self.action.value} trains fewer long rollouts than"
            " the policy samples"
        )
        self.reporter.record_event("SlowGroups", message, warning=True)
