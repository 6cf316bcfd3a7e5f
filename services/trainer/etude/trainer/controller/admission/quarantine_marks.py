"""Quarantine marks: versions and engines whose rollouts must not be trained."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from etude.common.blobs import Store
from etude.common.weights import EpochRecord, VersionId, list_quarantined, list_suspects
from etude.common.weights.protocol.epochs import epoch_or_none
from etude.trainer.contents.measures import version_uses
from etude.trainer.rollouts.trajectories.rollback import Rollback
from etude.v1 import journal_pb2

RedrawReason = Literal["quarantined_policy", "suspect_policy", "rolled_back_policy"]
"""Reason to drop and redraw a rollout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantineMarks:
    """Known marks of versions, engines and epochs."""

    quarantined: frozenset[VersionId] = frozenset()
    suspects: Mapping[str, VersionId] = field(default_factory=dict)
    """Version since which an engine process is suspect, by its name in spans."""
    rollbacks: tuple[EpochRecord, ...] = ()
    """Epochs that rolled back to an older version."""

    def drop_reason(self, record: journal_pb2.JournalRollout) -> RedrawReason | None:
        """Reason to drop a rollout; None if it may be trained."""
        uses = version_uses(record)
        versions = {VersionId.from_proto(v) for use in uses for v in (use.sampled, use.context)}
        if versions & self.quarantined:
            return "quarantined_policy"
        if any(self._is_rolled_back(version) for version in versions):
            return "rolled_back_policy"
        for use in uses:
            since = self.suspects.get(use.replica)
            if since is not None and use.sampled.number >= since.number:
                return "suspect_policy"
        return None

    def list_rollbacks(self) -> tuple[Rollback, ...]:
        """Returns to older versions, in the form in which rollout workers take them."""
        return tuple(
            Rollback(record.epoch, -1 if record.parent is None else record.parent.number)
            for record in self.rollbacks
        )

    def _is_rolled_back(self, version: VersionId) -> bool:
        """True if a later epoch rolled the version back; a take-over does not."""
        return any(rollback.abandons(version) for rollback in self.list_rollbacks())


@dataclass(slots=True)
class MarkReader:
    """Reads the marks of a run's store; epochs never change, so each is read once."""

    store: Store
    _rollbacks: list[EpochRecord] = field(default_factory=list)
    _next_epoch: int = 1

    def read(self) -> QuarantineMarks:
        """Read all current marks.

        Raises:
            CorruptError: an epoch's record is damaged.
            StoreError: the store failed; read again.
        """
        for record in self._new_epochs():
            self._next_epoch = record.epoch + 1
            if record.reason == "rollback":
                self._rollbacks.append(record)
        return QuarantineMarks(
            quarantined=list_quarantined(self.store),
            suspects={each.replica: each.since for each in list_suspects(self.store)},
            rollbacks=tuple(self._rollbacks),
        )

    def _new_epochs(self) -> Iterable[EpochRecord]:
        epoch = self._next_epoch
        while (record := epoch_or_none(self.store, epoch)) is not None:
            yield record
            epoch += 1
