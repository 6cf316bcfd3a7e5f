"""What was sampled by weights that are not trusted is named, with its reason."""

import random

import pytest

from etude.common.blobs import MemoryStore
from etude.common.weights import EpochRecord, VersionId, claim_epoch, mark_suspect, quarantine
from etude.trainer.controller.admission.quarantine_marks import MarkReader, QuarantineMarks
from etude.v1.journal_pb2 import JournalRollout
from etude.v1.rollout_pb2 import Link, Rollout
from etude.v1.weights_pb2 import PolicySpan

V4, V5, V6 = VersionId(1, 4), VersionId(1, 5), VersionId(2, 6)


def rollout(*spans: tuple[VersionId, VersionId, str]) -> JournalRollout:
    """Spans as (context, sampled, replica)."""
    link = Link()
    for context, sampled, replica in spans:
        link.spans.append(
            PolicySpan(context=context.to_proto(), sampled=sampled.to_proto(), replica=replica)
        )
    return JournalRollout(rollout=Rollout(links=[Link(), link]))


@pytest.fixture
def store() -> MemoryStore:
    store = MemoryStore()
    claim_epoch(store, holder="t", parent=None, reason="start")
    return store


def marks(store: MemoryStore) -> QuarantineMarks:
    return MarkReader(store).read()


def test_nothing_speaks_against_a_rollout_of_a_quiet_run(store: MemoryStore) -> None:
    assert marks(store) == QuarantineMarks()
    assert QuarantineMarks().drop_reason(rollout((V4, V5, "a"))) is None


@pytest.mark.parametrize("spans", [[(V4, V5, "a")], [(V5, V6, "a")], [(V4, V4, "a"), (V5, V5, "")]])
def test_a_quarantined_version_taints_what_it_sampled_and_what_read_its_cache(
    store: MemoryStore, spans: list[tuple[VersionId, VersionId, str]]
) -> None:
    quarantine(store, V5, reason="digest")
    assert marks(store).drop_reason(rollout(*spans)) == "quarantined_policy"
    assert marks(store).drop_reason(rollout((V4, V6, "a"))) is None


def test_a_suspect_process_taints_only_its_own_tokens_since_its_last_good_audit(
    store: MemoryStore,
) -> None:
    mark_suspect(store, "engine-0.ab12", since=V5, message="state differs")
    found = marks(store)
    assert found.drop_reason(rollout((V4, V5, "engine-0.ab12"))) == "suspect_policy"
    assert found.drop_reason(rollout((V4, V6, "engine-0.ab12"))) == "suspect_policy"
    assert found.drop_reason(rollout((V4, V4, "engine-0.ab12"), (V4, V6, "engine-1.cd34"))) is None
    assert found.drop_reason(rollout((V4, V6, "engine-0.ff00"))) is None


def test_what_a_rollback_took_back_is_dropped_and_what_a_takeover_left_is_not(
    store: MemoryStore,
) -> None:
    claim_epoch(store, holder="t", parent=None, reason="takeover")
    assert marks(store).drop_reason(rollout((V4, V5, ""))) is None
    store = MemoryStore()
    for _ in range(2):
        claim_epoch(store, holder="t", parent=None, reason="start")
    reader = MarkReader(store)
    assert reader.read().drop_reason(rollout((V4, V5, ""))) is None
    claim_epoch(store, holder="t", parent=None, reason="rollback")
    assert reader.read().drop_reason(rollout((V4, V5, ""))) == "rolled_back_policy"
    newer = VersionId(3, 7)
    assert reader.read().drop_reason(rollout((newer, newer, ""))) is None


def test_only_versions_above_the_parent_of_a_rollback_are_taken_back() -> None:
    draw = random.Random(3)
    for _ in range(200):
        parent = VersionId(draw.randint(1, 3), draw.randint(0, 9))
        epoch = parent.epoch + draw.randint(1, 2)
        version = VersionId(draw.randint(1, 6), draw.randint(0, 12))
        record = _record(epoch, parent)
        is_after = version.epoch >= epoch
        expected = None if is_after or version.number <= parent.number else "rolled_back_policy"
        found = QuarantineMarks(rollbacks=(record,)).drop_reason(rollout((version, version, "")))
        assert found == expected


def _record(epoch: int, parent: VersionId) -> EpochRecord:
    return EpochRecord(
        epoch=epoch,
        parent_epoch=parent.epoch,
        parent_number=parent.number,
        first_number=99,
        reason="rollback",
        holder="t",
        nonce="n",
    )
