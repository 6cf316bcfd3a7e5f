"""The audit finds every way in which a journal can break the account of rollouts."""

import copy
import random
from collections.abc import Callable

import pytest
from tests.support.trainer.run_history import PER_STEP, STALENESS, History, history, judged, packed

from etude.trainer.controller.journal.audit import REASONS, audit_journal
from etude.trainer.controller.journal.ledger import DROP_REASONS, REDRAWN
from etude.v1 import journal_pb2 as pb

Mutation = Callable[[History, list[pb.JournalRecord], random.Random], str]


def _places(records: list[pb.JournalRecord], kind: str) -> list[int]:
    return [i for i, r in enumerate(records) if r.WhichOneof("body") == kind]


def _dropped(records: list[pb.JournalRecord]) -> set[str]:
    return {records[i].drop.rollout_id for i in _places(records, "drop")}


def drop_an_id_from_a_batch(
    _made: History, records: list[pb.JournalRecord], draw: random.Random
) -> str:
    # The group stays queued for ever although later steps went on: its rollouts add up still,
    # but the next batch that should have taken it is one short. The driver's ledger has the ids.
    place = draw.choice(_places(records, "batch"))
    lost = records[place].batch.group_ids.pop()
    records[:] = [
        r
        for r in records
        if not (r.WhichOneof("body") == "rollout" and r.rollout.rollout.group_id == lost)
    ]
    return "I1"


def drop_a_batch(_made: History, records: list[pb.JournalRecord], draw: random.Random) -> str:
    del records[draw.choice(_places(records, "batch")[:-1])]
    return "I4"


def drop_a_drop(_made: History, records: list[pb.JournalRecord], draw: random.Random) -> str:
    trained = {g for i in _places(records, "batch") for g in records[i].batch.group_ids}
    drops = [
        i
        for i in _places(records, "drop")
        if records[i].drop.rollout_id and records[i].drop.group_id in trained
    ]
    if not drops:
        return ""
    place = draw.choice(drops)
    # A place that two rollouts hold is trained twice; one without a reward is trained at all.
    broken = "I2" if records[place].drop.reason in REDRAWN else "I1"
    del records[place]
    return broken


def lose_an_acknowledged_id(
    made: History, _records: list[pb.JournalRecord], _draw: random.Random
) -> str:
    made.acknowledged.append("never-written")
    return "I1"


def train_a_group_again(
    _made: History, records: list[pb.JournalRecord], draw: random.Random
) -> str:
    batches = _places(records, "batch")
    first = draw.randrange(len(batches) - 1)
    later = draw.randrange(first + 1, len(batches))
    records[batches[later]].batch.group_ids[0] = records[batches[first]].batch.group_ids[0]
    return "I2"


def admit_a_task_again(_made: History, records: list[pb.JournalRecord], draw: random.Random) -> str:
    admits = _places(records, "admit")
    one, other = draw.sample(admits, 2)
    records[other].admit.task_id = records[one].admit.task_id
    return "I2"


def age_a_rollout(_made: History, records: list[pb.JournalRecord], draw: random.Random) -> str:
    trained = {g for i in _places(records, "batch") for g in records[i].batch.group_ids}
    old = [
        i
        for i in _places(records, "rollout")
        if records[i].rollout.rollout.oldest.number > STALENESS
        and records[i].rollout.rollout.group_id in trained
        and records[i].rollout.rollout.rollout_id not in _dropped(records)
        and records[i].rollout.reward.WhichOneof("result") == "reward"
    ]
    records[draw.choice(old)].rollout.rollout.oldest.number -= STALENESS + 1
    return "I3"


def use_a_version_early(
    _made: History, records: list[pb.JournalRecord], draw: random.Random
) -> str:
    last = _places(records, "batch")[-1]
    trained = {g for i in _places(records, "batch") for g in records[i].batch.group_ids}
    early = [
        i
        for i in _places(records[:last], "rollout")
        if records[i].rollout.rollout.group_id in trained
        and records[i].rollout.rollout.rollout_id not in _dropped(records)
        and records[i].rollout.reward.WhichOneof("result") == "reward"
    ]
    records[draw.choice(early)].rollout.rollout.newest.number += 1
    return "I3"


def swap_two_batches(_made: History, records: list[pb.JournalRecord], draw: random.Random) -> str:
    one, other = sorted(draw.sample(_places(records, "batch"), 2))
    records[one], records[other] = records[other], records[one]
    return "I4"


def truncate_inside(_made: History, records: list[pb.JournalRecord], draw: random.Random) -> str:
    del records[draw.randrange(len(records) // 2) :]
    return "I1"


def double_a_rollout(_made: History, records: list[pb.JournalRecord], draw: random.Random) -> str:
    place = draw.choice(_places(records, "rollout"))
    records.insert(place, copy.deepcopy(records[place]))
    return "I2"


@pytest.mark.parametrize(
    "mutate",
    [
        drop_an_id_from_a_batch,
        drop_a_batch,
        drop_a_drop,
        lose_an_acknowledged_id,
        train_a_group_again,
        admit_a_task_again,
        age_a_rollout,
        use_a_version_early,
        swap_two_batches,
        truncate_inside,
        double_a_rollout,
    ],
)
def test_the_audit_finds_every_kind_of_mutated_history(mutate: Mutation) -> None:
    tried = 0
    for seed in range(40):
        made = history(seed)
        records = copy.deepcopy(made.records)
        expected = mutate(made, records, random.Random(seed))
        if not expected:
            continue
        tried += 1
        found = {finding.invariant for finding in judged(made, records).findings}
        assert expected in found, f"seed {seed}: {found}"
    assert tried >= 10


def test_checkpoints_go_back_only_with_a_new_epoch() -> None:
    made = history(2)
    bodies = [
        pb.JournalCheckpoint(step=step, uri="memory://run/checkpoints", manifest_digest=f"d{step}")
        for step in (1, 3, 2)
    ]
    records = [*made.records, *(pb.JournalRecord(checkpoint=body) for body in bodies)]
    assert "I5" not in {f.invariant for f in judged(made, records[:-1]).findings}
    assert [f.invariant for f in judged(made, records).findings] == ["I5"]


@pytest.mark.parametrize("kind", ["missing", "twice", "order"])
def test_the_audit_finds_a_log_that_was_tampered_with(kind: str) -> None:
    made = history(1)
    records = copy.deepcopy(made.records)
    match kind:
        case "missing":
            del records[9]
        case "twice":
            records.insert(9, copy.deepcopy(records[9]))
        case _:
            records[9], records[10] = records[10], records[9]
    objects = packed(records, renumber=False)
    assert any(f.invariant == "log" for f in audit_journal(objects).findings)


def test_the_audit_names_a_damaged_segment() -> None:
    objects = packed(history(1).records)
    key = sorted(objects)[1]
    objects[key] = objects[key][:60] + b"\xff" + objects[key][61:]
    assert any(f.invariant == "log" and key in f.what for f in audit_journal(objects).findings)


def test_independent_records_may_come_in_any_order() -> None:
    made = history(3)
    records = copy.deepcopy(made.records)
    for i in range(len(records) - 1):
        one, two = records[i], records[i + 1]
        kinds = {one.WhichOneof("body"), two.WhichOneof("body")}
        if kinds == {"rollout"} and one.rollout.rollout.index % 2 == 0:
            records[i], records[i + 1] = two, one
    assert judged(made, records).findings == []


def test_the_audit_and_the_ledger_know_the_same_reasons() -> None:
    assert DROP_REASONS == REASONS


@pytest.mark.parametrize(
    ("rollout", "reason"), [("g0-0", "boredom"), ("", "suspect_policy"), ("g0-0", "stale")]
)
def test_the_audit_finds_drops_without_a_reason_of_their_kind(rollout: str, reason: str) -> None:
    made = History()
    made.open()
    made.finish(made.admit())
    drop = pb.JournalDrop(group_id="g0", rollout_id=rollout, reason=reason)
    found = judged(made, [*made.records, pb.JournalRecord(drop=drop)])
    assert [finding.invariant for finding in found.findings] == ["I1"]


def test_the_audit_finds_a_place_that_is_trained_twice() -> None:
    made = History()
    made.open()
    groups = [made.admit() for _ in range(PER_STEP)]
    for name in groups:
        made.finish(name)
    made.draw_again("g0", 1, "suspect_policy", times=1)
    made.train(groups)
    kept = [r for r in made.records if r.WhichOneof("body") != "drop"]
    assert "I2" in {finding.invariant for finding in judged(made, kept).findings}
