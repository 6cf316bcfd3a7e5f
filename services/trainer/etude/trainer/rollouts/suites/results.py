"""Durable results of an evaluation without a run: one create-only object for each rollout."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from etude.common.blobs import ExistsError, Store
from etude.common.blobs.store import MAX_CREATE_BYTES
from etude.common.errors import CorruptError
from etude.common.weights import VersionId
from etude.trainer.contents.measures import version_uses
from etude.v1 import journal_pb2

log = logging.getLogger(__name__)

SAMPLES = "samples/"
OTHER_POLICY = "other_policy"
"""Reason to redraw a rollout that another version than the evaluated one touched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteResults:
    """Finished rollouts of one evaluation of one policy version."""

    store: Store
    """Opened at the evaluation's own prefix."""
    policy: VersionId | None
    """None for a policy at an endpoint, whose rollouts have no tokens."""

    def read(self) -> dict[str, journal_pb2.JournalRollout]:
        """Finished rollouts by id.

        Raises:
            CorruptError: an object is no rollout of this version.
        """
        found = {}
        for key in sorted(info.key for info in self.store.list(SAMPLES)):
            where = f"{self.store.url}/{key}"
            try:
                record = journal_pb2.JournalRollout.FromString(self.store.get(key))
            except DecodeError as cause:
                raise CorruptError(f"{where} is no rollout: {cause}") from cause
            if key != _key(record) or not self.is_finished(record):
                raise CorruptError(f"{where} is no finished rollout of version {self.policy}")
            found[record.rollout.rollout_id] = record
        return found

    def write(self, records: Iterable[journal_pb2.JournalRollout]) -> None:
        """Keep those that are finished; the first result of a rollout stays."""
        for record in records:
            if not self.is_finished(record):
                continue
            data = record.SerializeToString()
            if len(data) > MAX_CREATE_BYTES:
                # It counts for this process, and a later one runs it again.
                log.warning("rollout %s is not kept: %d bytes", _key(record), len(data))
                continue
            try:
                self.store.create(_key(record), data)
            except ExistsError:
                continue

    def is_finished(self, record: journal_pb2.JournalRollout) -> bool:
        """True if a rollout has a reward, and no other version touched it; it may have no token."""
        has_reward = record.reward.WhichOneof("result") == "reward"
        return has_reward and _touching_versions(record) <= (
            set() if self.policy is None else {self.policy}
        )

    def find_marked(self, records: Iterable[journal_pb2.JournalRollout]) -> dict[str, str]:
        """Rollouts with a reward that another version touched."""
        return {
            record.rollout.rollout_id: OTHER_POLICY
            for record in records
            if record.reward.WhichOneof("result") == "reward" and not self.is_finished(record)
        }


def _touching_versions(record: journal_pb2.JournalRollout) -> set[VersionId]:
    """Versions that sampled a rollout's tokens or that these attended to."""
    uses = version_uses(record)
    return {VersionId.from_proto(v) for use in uses for v in (use.sampled, use.context)}


def _key(record: journal_pb2.JournalRollout) -> str:
    return f"{SAMPLES}{record.rollout.rollout_id}.pb"
