"""Results of an evaluation: rollouts with a reward that no other version touched."""

import pytest

from etude.common.blobs import MemoryStore
from etude.common.weights import VersionId
from etude.trainer.rollouts.suites.results import OTHER_POLICY, SuiteResults
from etude.v1 import journal_pb2

POLICY, OTHER = VersionId.parse("1.4"), VersionId.parse("1.5")


def _record(*versions: VersionId, name: str = "a") -> journal_pb2.JournalRollout:
    record = journal_pb2.JournalRollout()
    record.reward.reward = 0.0
    record.rollout.rollout_id = name
    if versions:
        link = record.rollout.links.add()
        for version in versions:
            link.spans.add(sampled=version.to_proto(), context=version.to_proto())
    return record


@pytest.mark.parametrize(
    ("versions", "is_finished"),
    [((), True), ((POLICY,), True), ((OTHER,), False), ((POLICY, OTHER), False)],
)
def test_a_rollout_counts_unless_another_version_touched_it(
    versions: tuple[VersionId, ...], *, is_finished: bool
) -> None:
    results = SuiteResults(store=MemoryStore(), policy=POLICY)
    record = _record(*versions)
    assert results.is_finished(record) is is_finished
    assert results.find_marked([record]) == ({} if is_finished else {"a": OTHER_POLICY})
    results.write([record])
    assert results.read() == ({"a": record} if is_finished else {})
