"""The account of rollouts: live and resumed it is the same fold, and the audit agrees with it."""

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.common.errors import CorruptError
from etude.trainer.controller import segments
from etude.trainer.controller.audit import REASONS, Audit, audit
from etude.trainer.controller.ledger import (
    DROP_REASONS,
    REDRAWN,
    Ledger,
    LedgerState,
    Step,
    resumed,
)
from etude.v1 import journal_pb2 as pb
from etude.v1.rewards_pb2 import RewardFault, RewardRecord
from etude.v1.rollout_pb2 import Rollout
from etude.v1.weights_pb2 import PolicyVersion

GROUP_SIZE = 3
PER_STEP = 2
STALENESS = 1


@dataclass
class History:
    """A legal run, step by step, with its ledger."""

    records: list[pb.JournalRecord] = field(default_factory=list)
    ledger: Ledger = field(default_factory=Ledger)
    admitted: int = 0
    steps: int = 0
    acknowledged: list[str] = field(default_factory=list)

    def add(self, record: pb.JournalRecord) -> None:
        record.sequence = len(self.records) + 1
        self.records.append(record)
        self.ledger.apply(copy.deepcopy(record))

    def open(self) -> None:
        self.add(pb.JournalRecord(open=pb.JournalOpen(epoch=1)))
        self.publish()

    def publish(self) -> None:
        body = pb.JournalPublished(epoch=1, number=self.steps, step=100 + self.steps)
        self.add(pb.JournalRecord(published=body))

    def admit(self) -> str:
        name = f"g{self.admitted}"
        body = pb.JournalAdmit(
            group_id=name, phase="rl", position=self.admitted, task_id=f"t{self.admitted}"
        )
        self.admitted += 1
        self.add(pb.JournalRecord(admit=body))
        return name

    def finish(self, group: str, *, faults: int = 0) -> None:
        version = PolicyVersion(epoch=1, number=self.steps)
        for index in range(GROUP_SIZE):
            name = f"{group}-{index}"
            rollout = Rollout(
                rollout_id=name, group_id=group, index=index, oldest=version, newest=version
            )
            fault = RewardFault(reason="INFRA") if index < faults else None
            reward = RewardRecord(rollout_id=name, fault=fault) if fault else RewardRecord(reward=1)
            body = pb.JournalRollout(rollout=rollout, reward=reward)
            self.add(pb.JournalRecord(rollout=body))
            self.acknowledged.append(name)
        for index in range(faults):
            reason = "invalid_span" if index % 2 else "platform"
            self.take_out(group, f"{group}-{index}", reason)

    def take_out(self, group: str, name: str, reason: str) -> None:
        drop = pb.JournalDrop(group_id=group, rollout_id=name, reason=reason)
        self.add(pb.JournalRecord(drop=drop))

    def draw_again(self, group: str, index: int, reason: str, *, times: int) -> None:
        """Drop a sibling that was sound, as often as told, and accept another in its place."""
        name = f"{group}-{index}"
        for drawn in range(1, times + 1):
            self.take_out(group, name, reason)
            name = f"{group}-{index}-again{drawn}"
            version = PolicyVersion(epoch=1, number=self.steps)
            rollout = Rollout(
                rollout_id=name, group_id=group, index=index, oldest=version, newest=version
            )
            record = pb.JournalRollout(rollout=rollout, reward=RewardRecord(reward=drawn))
            self.add(pb.JournalRecord(rollout=record))
            self.acknowledged.append(name)

    def drop(self, group: str) -> None:
        self.add(pb.JournalRecord(drop=pb.JournalDrop(group_id=group, reason="stale")))

    def train(self, groups: list[str]) -> None:
        self.steps += 1
        batch = pb.JournalBatch(phase="rl", step=self.steps, group_ids=groups)
        self.add(pb.JournalRecord(batch=batch))
        self.ledger.forget(Step("rl", self.steps))
        self.add(pb.JournalRecord(step=pb.JournalStep(phase="rl", step=self.steps)))
        self.publish()


def history(seed: int, *, steps: int = 6) -> History:
    draw = random.Random(seed)
    made = History()
    made.open()
    for _ in range(steps):
        groups = [made.admit() for _ in range(PER_STEP + draw.randint(0, 1))]
        for name in draw.sample(groups, len(groups)):
            made.finish(name, faults=draw.choice([0, 0, 1, 2]))
            if draw.random() < 0.3:
                made.draw_again(
                    name, GROUP_SIZE - 1, draw.choice(sorted(REDRAWN)), times=draw.randint(1, 2)
                )
        for name in groups[PER_STEP:]:
            made.drop(name)
        made.train(groups[:PER_STEP])
    made.finish(made.admit())
    made.admit()
    return made


def packed(records: list[pb.JournalRecord], *, renumber: bool = True) -> dict[str, bytes]:
    frames = []
    for place, record in enumerate(records, start=1):
        if renumber:
            record.sequence = place
        frames.append(segments.encode_record(record))
    objects = {}
    for start in range(0, len(frames), 7):
        data = segments.encode_segment("u", 1, first=start + 1, frames=frames[start : start + 7])
        objects[f"journal/000001/{start + 1:012d}.wal"] = data
    return objects


def judged(made: History, records: list[pb.JournalRecord] | None = None) -> Audit:
    return audit(
        packed(made.records if records is None else records),
        acknowledged=made.acknowledged,
        max_staleness=STALENESS,
    )


@settings(max_examples=60)
@given(st.integers(0, 10**6))
def test_the_audit_of_a_legal_run_finds_nothing_and_agrees_with_the_ledger(seed: int) -> None:
    made = history(seed)
    found = judged(made)
    assert found.findings == []
    ledger = made.ledger
    assert (found.accepted, found.trained, found.queued) == (
        ledger.accepted,
        ledger.trained,
        ledger.queued,
    )
    assert found.dropped == ledger.dropped
    assert ledger.accepted == ledger.trained + ledger.dropped.total() + ledger.queued


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.data())
def test_a_ledger_resumed_anywhere_equals_the_one_that_was_never_stopped(
    seed: int, data: st.DataObject
) -> None:
    made = history(seed)
    cut = data.draw(st.integers(1, len(made.records)))
    while made.records[cut - 1].WhichOneof("body") == "batch":
        cut -= 1  # no checkpoint lies between a batch and its step
    before = Ledger()
    for record in made.records[:cut]:
        before.apply(copy.deepcopy(record))
        for step in list(before.batches):
            before.forget(step)
    state = LedgerState.model_validate_json(before.state().model_dump_json())
    since = min([cut + 1, *state.live.values()])
    after = resumed(state, copy.deepcopy(made.records[since - 1 :]), sequence=cut)
    whole = Ledger()
    for record in made.records:
        whole.apply(copy.deepcopy(record))
    trained_since = {step for step in whole.batches if step not in before.batches}
    assert after.live == whole.live
    assert after.consumed == whole.consumed
    assert (after.accepted, after.trained, after.dropped) == (
        whole.accepted,
        whole.trained,
        whole.dropped,
    )
    assert after.versions == whole.versions
    assert after.batches == {
        step: whole.batches[step]
        for step in trained_since
        if any(
            r.sequence > cut and r.batch.step == step.number
            for r in made.records
            if r.WhichOneof("body") == "batch"
        )
    }


def test_a_rollout_delivered_twice_counts_once() -> None:
    made = History()
    made.open()
    made.finish(group := made.admit())
    again = copy.deepcopy(made.records[-1])
    made.ledger.apply(again)
    assert made.ledger.accepted == GROUP_SIZE
    assert made.ledger.queued == GROUP_SIZE
    assert group in made.ledger.live


def test_a_task_that_was_consumed_is_never_admitted_again() -> None:
    made = History()
    made.open()
    made.admit()
    made.admitted = 0
    with pytest.raises(CorruptError, match="t0 was admitted before"):
        made.admit()


def test_a_group_is_not_trained_twice() -> None:
    made = History()
    made.open()
    made.finish(group := made.admit())
    made.train([group])
    with pytest.raises(CorruptError, match="trains g0 again"):
        made.train([group])


def test_a_checkpoint_whose_journal_is_gone_is_refused() -> None:
    state = LedgerState(live={"g0": 5})
    with pytest.raises(CorruptError, match="g0"):
        resumed(state, [], sequence=9)


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
    assert any(f.invariant == "log" for f in audit(objects).findings)


def test_the_audit_names_a_damaged_segment() -> None:
    objects = packed(history(1).records)
    key = sorted(objects)[1]
    objects[key] = objects[key][:60] + b"\xff" + objects[key][61:]
    assert any(f.invariant == "log" and key in f.what for f in audit(objects).findings)


def test_independent_records_may_come_in_any_order() -> None:
    made = history(3)
    records = copy.deepcopy(made.records)
    for i in range(len(records) - 1):
        one, two = records[i], records[i + 1]
        kinds = {one.WhichOneof("body"), two.WhichOneof("body")}
        if kinds == {"rollout"} and one.rollout.rollout.index % 2 == 0:
            records[i], records[i + 1] = two, one
    assert judged(made, records).findings == []


def test_a_rollout_that_is_drawn_again_leaves_its_place_to_another() -> None:
    made = History()
    made.open()
    group = made.admit()
    made.finish(group)
    made.take_out(group, f"{group}-1", "suspect_policy")
    assert made.ledger.live[group].missing(GROUP_SIZE) == [1]
    assert made.ledger.live[group].draws(GROUP_SIZE) == (0, 1, 0)
    assert made.ledger.dropped == {"suspect_policy": 1}
    assert (made.ledger.queued, made.ledger.discarded, made.ledger.masked) == (2, 1, 0)


def test_a_rollout_that_was_dropped_and_comes_again_is_not_counted_again() -> None:
    made = History()
    made.open()
    group = made.admit()
    made.finish(group)
    late = next(r for r in made.records if r.rollout.rollout.rollout_id == f"{group}-1")
    made.take_out(group, f"{group}-1", "quarantined_policy")
    made.ledger.apply(copy.deepcopy(late))
    assert made.ledger.live[group].missing(GROUP_SIZE) == [1]
    assert made.ledger.accepted == GROUP_SIZE


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
