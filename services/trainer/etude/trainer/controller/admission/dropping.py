"""Dropping of accepted rollouts from the buffer, each journaled with its reason."""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from etude.common.blobs import Store
from etude.common.errors import StoreError
from etude.common.store_retry import StoreRetry
from etude.trainer.contents.rollout_checks import InvalidSpanError
from etude.trainer.controller.admission.groups import RolloutGroup
from etude.trainer.controller.admission.quarantine_marks import MarkReader, QuarantineMarks
from etude.trainer.controller.checkpoints.recovery import JournaledLedger
from etude.trainer.controller.reporting.reporter import RunReporter
from etude.v1 import journal_pb2

log = logging.getLogger(__name__)

DAMAGED = "damaged"
"""Reason to drop a rollout whose tokens are gone, or are not those that were accepted."""


def drop_group(book: JournaledLedger, group: RolloutGroup, reason: str) -> None:
    """Drop a group with all its rollouts."""
    _drop(book, journal_pb2.JournalDrop(group_id=group.group_id, reason=reason))


def drop_rollout(book: JournaledLedger, group: RolloutGroup, rollout_id: str, reason: str) -> int:
    """Drop one rollout of a group; return the number of its record."""
    body = journal_pb2.JournalDrop(group_id=group.group_id, rollout_id=rollout_id, reason=reason)
    return _drop(book, body)


def drop_surplus(book: JournaledLedger, phase: str) -> None:
    """Drop groups of a phase that ends before they are trained; none runs any more."""
    for group in [g for g in book.ledger.live.values() if g.phase == phase]:
        drop_group(book, group, "surplus")


def drop_faulty(book: JournaledLedger, groups: Iterable[RolloutGroup]) -> None:
    """Drop every rollout that a platform fault left without a reward."""
    for group in groups:
        for index in group.faulty_indices():
            record = group.finished[index]
            is_span = record.reward.fault.reason == InvalidSpanError.reason
            reason = "invalid_span" if is_span else "platform"
            drop_rollout(book, group, record.rollout.rollout_id, reason)


@dataclass(slots=True)
class QuarantineFilter:
    """Drops rollouts that were sampled by quarantined, suspect or rolled-back weights."""

    store: Store
    book: JournaledLedger
    reporter: RunReporter
    store_retry: StoreRetry
    marks: QuarantineMarks = field(default_factory=QuarantineMarks)
    _reader: MarkReader = field(init=False)

    def __post_init__(self) -> None:
        self._reader = MarkReader(self.store)

    async def refresh(self, *, patiently: bool = True) -> bool:
        """Read the marks from the store; True if there are new ones.

        Args:
            patiently: True to wait for an unreachable store; else it is read once, if the journal
                reaches it, and the known marks stay valid on an error.

        Raises:
            StoreError: the store stayed away.
        """
        if not patiently and self.book.journal.is_away:
            return False
        before, what = self.marks, "marks of versions and engines"
        patience = self.store_retry if patiently else StoreRetry(limit_s=0.0)
        try:
            self.marks = await patience.retry(what, lambda: asyncio.to_thread(self._reader.read))
        except StoreError as error:
            if patiently:
                raise
            log.warning("%s were not read, the known ones stay valid: %s", what, error)
        return self.marks != before

    def drop_marked(self, groups: Iterable[RolloutGroup]) -> int:
        """Drop the marked rollouts of these groups, to be redrawn; return their number."""
        found: Counter[str] = Counter()
        for group in groups:
            for index in group.valid_indices():
                record = group.finished[index]
                if (reason := self.marks.drop_reason(record)) is not None:
                    drop_rollout(self.book, group, record.rollout.rollout_id, reason)
                    found[reason] += 1
        for why, count in found.items():
            message = f"{count} rollouts are redrawn: {why}"
            self.reporter.record_event("RolloutsRedrawn", message, warning=True)
        return found.total()


def _drop(book: JournaledLedger, body: journal_pb2.JournalDrop) -> int:
    return book.write(journal_pb2.JournalRecord(drop=body))
