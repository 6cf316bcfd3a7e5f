"""Windows of production rollouts in the journal: admitted, resumed and dropped as groups.

The slices of a window are trained from the first to the last, and dropped from the last to the
first. So nothing of a window was trained as long as its first slice is live, however often
controllers died meanwhile.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from etude.common.feedback.windows import WindowManifest
from etude.trainer.controller.admission.dropping import drop_group
from etude.trainer.controller.admission.groups import RolloutGroup
from etude.trainer.controller.admission.windows import (
    WindowSlice,
    count_admitted,
    cut_window,
    journal_rollout,
)
from etude.trainer.controller.checkpoints.recovery import JournaledLedger
from etude.v1 import journal_pb2

RECORDS_AT_ONCE = 256
"""Records that are journaled before other tasks run."""


@dataclass(slots=True, kw_only=True)
class WindowGroups:
    """The windows of one phase, as its run's ledger has them."""

    book: JournaledLedger
    uri: str
    """Of the feedback store."""
    phase: str
    """Name of the phase."""
    seed: int
    """Of the phase."""

    @property
    def last(self) -> int:
        """Newest window that was admitted at least in part; 0 for none."""
        return max(self._counts(), default=0)

    def is_done(self, number: int) -> bool:
        """True if every slice of a window was trained or dropped."""
        count = self._counts().get(number)
        if count is None or self.live(number):
            return False
        return all(s.task_id in self.book.ledger.consumed for s in self._cut(number, 0, count))

    def is_begun(self, number: int) -> bool:
        """True if a slice of a window was trained, and its first one is settled in any case."""
        count = self._counts().get(number)
        return (
            count is not None
            and self._cut(number, 0, count)[0].group_id not in self.book.ledger.live
        )

    def live(self, number: int) -> list[RolloutGroup]:
        """Slices of a window that are neither trained nor dropped, in order."""
        live = self.book.ledger.live.values()
        return [g for g in live if g.phase == self.phase and g.position == number]

    async def admit(self, manifest: WindowManifest, *, steps: int) -> list[RolloutGroup]:
        """Journal a window's slices and rollouts, as far as they are not yet; return live ones.

        Args:
            manifest: of the window.
            steps: slices at most, if an earlier controller did not begin to admit it.
        """
        number, size = manifest.number, len(manifest.rollouts)
        count = self._counts().get(number, max(1, min(steps, size)))
        written = 0
        for each in self._cut(number, size, count):
            self._admit_slice(number, each)
            group = self.book.ledger.live.get(each.group_id)
            if group is None:
                continue  # trained or dropped by an earlier controller
            for index in each.members:
                if index in group.finished or manifest.rollouts[index].rollout in group.spent:
                    continue
                record = journal_rollout(manifest, index, group=group)
                self.book.write(journal_pb2.JournalRecord(rollout=record))
                written += 1
                if not written % RECORDS_AT_ONCE:
                    await asyncio.sleep(0)
        return self.live(number)

    def admit_uncounted(self, number: int) -> None:
        """Journal a window without its rollouts, which are unknown or another run's."""
        for each in self._cut(number, 0, self._counts().get(number, 1)):
            self._admit_slice(number, each)

    def drop(self, groups: Sequence[RolloutGroup], reason: str) -> None:
        """Drop live slices, the first one last."""
        for group in reversed(groups):
            drop_group(self.book, group, reason)

    def _counts(self) -> dict[int, int]:
        return count_admitted(self.book.ledger.consumed, self.uri)

    def _cut(self, number: int, size: int, count: int) -> list[WindowSlice]:
        return cut_window(number, size, count=count, uri=self.uri, phase=self.phase, seed=self.seed)

    def _admit_slice(self, number: int, each: WindowSlice) -> None:
        if each.task_id not in self.book.ledger.consumed:
            body = journal_pb2.JournalAdmit(
                group_id=each.group_id,
                phase=self.phase,
                position=number,
                task_id=each.task_id,
                seed=self.seed,
            )
            self.book.write(journal_pb2.JournalRecord(admit=body))
