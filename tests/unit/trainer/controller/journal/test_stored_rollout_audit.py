"""The audit names stored rollouts that are not what was accepted, and none that were dropped."""

from collections.abc import Callable

import pytest
from tests.support.trainer.run_history import packed

from etude.common.blobs import MemoryStore
from etude.trainer.contents.call_figures import measure_calls
from etude.trainer.contents.objects import write_calls, write_links, write_object
from etude.trainer.controller.journal.audit import JournalFinding
from etude.trainer.controller.journal.trajectory_audit import journaled_rollouts
from etude.v1 import journal_pb2, rollout_pb2

PREFIX = "contents/g/"
Change = Callable[[MemoryStore, journal_pb2.JournalRollout], object]


def stored(store: MemoryStore, name: str) -> journal_pb2.JournalRollout:
    rollout = rollout_pb2.Rollout(rollout_id=name, group_id="g")
    rollout.links.add(token_ids=[1, 2], loss_mask=b"\0\1", sampler_logprobs=[0, -1])
    rollout.calls.add(turn=0, name="read_file")
    rollout.calls.add(turn=1, is_malformed=True)
    record = journal_pb2.JournalRollout(content=write_links(store, PREFIX, rollout))
    calls = write_calls(store, PREFIX, rollout)
    assert calls is not None
    record.content.calls.CopyFrom(calls)
    record.content.figures.CopyFrom(measure_calls(rollout))
    record.rollout.rollout_id = name
    return record


def audit(
    store: MemoryStore, *records: journal_pb2.JournalRecord
) -> tuple[list[str], list[JournalFinding]]:
    """Ids of the rollouts that are whole, and findings."""
    findings: list[JournalFinding] = []
    journal = packed(list(records))
    whole = [each.rollout_id for each in journaled_rollouts(journal, store.get, findings)]
    return whole, findings


def rollout_record(record: journal_pb2.JournalRollout) -> journal_pb2.JournalRecord:
    return journal_pb2.JournalRecord(sequence=1, rollout=record)


def lose_tokens(store: MemoryStore, record: journal_pb2.JournalRollout) -> None:
    del store.objects[record.content.tokens.key]


def lose_calls(store: MemoryStore, record: journal_pb2.JournalRollout) -> None:
    del store.objects[record.content.calls.key]


def alter_calls(store: MemoryStore, record: journal_pb2.JournalRollout) -> None:
    store.objects[record.content.calls.key] += b"\0"


def name_another_folder(store: MemoryStore, record: journal_pb2.JournalRollout) -> None:
    record.content.tokens.key = "contents/g/../../owner"


def store_no_rollout(store: MemoryStore, record: journal_pb2.JournalRollout) -> None:
    record.content.tokens.CopyFrom(write_object(store, f"{PREFIX}g-0", b"\xff\xff"))


def store_other_rollout(store: MemoryStore, record: journal_pb2.JournalRollout) -> None:
    record.content.tokens.CopyFrom(stored(store, "g-9").content.tokens)


def count_other_calls(store: MemoryStore, record: journal_pb2.JournalRollout) -> None:
    record.content.figures.malformed += 1


@pytest.mark.parametrize(
    ("change", "finding"),
    [
        (lose_tokens, "the tokens of g-0 are gone: contents/g/g-0."),
        (name_another_folder, "the tokens of g-0 are gone"),
        (store_no_rollout, "the tokens of g-0 are no rollout"),
        (store_other_rollout, "the tokens of g-0 are not those accepted"),
        (lose_calls, "the calls of g-0 are gone: contents/g/g-0.calls."),
        (alter_calls, "the calls of g-0 are not those accepted"),
        (count_other_calls, "the calls of g-0 are not as many as were accepted"),
    ],
)
def test_a_part_that_is_not_what_was_accepted_is_found(change: Change, finding: str) -> None:
    store = MemoryStore()
    first, second = stored(store, "g-0"), stored(store, "g-1")
    assert audit(store, rollout_record(first), rollout_record(second)) == (["g-0", "g-1"], [])
    change(store, first)
    whole, findings = audit(store, rollout_record(first), rollout_record(second))
    assert "g-1" in whole
    assert [each.invariant for each in findings] == ["I1"]
    assert finding in findings[0].what


def test_a_rollout_that_was_dropped_as_damaged_is_accounted_for() -> None:
    store = MemoryStore()
    record = stored(store, "g-0")
    lose_tokens(store, record)
    body = journal_pb2.JournalDrop(group_id="g", rollout_id="g-0", reason="damaged")
    drop = journal_pb2.JournalRecord(sequence=2, drop=body)
    assert audit(store, rollout_record(record), drop) == ([], [])
