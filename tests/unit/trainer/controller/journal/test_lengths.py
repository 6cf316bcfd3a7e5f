"""Lengths of lost work over those of trained rollouts, the same live and after a resume."""

import pytest

from etude.trainer.controller.journal.ledger import Ledger, StepId, resume_ledger
from etude.v1 import journal_pb2 as pb
from etude.v1 import rewards_pb2, rollout_pb2


def admit(group: str, position: int) -> pb.JournalRecord:
    body = pb.JournalAdmit(group_id=group, phase="rl", position=position, task_id=f"task-{group}")
    return pb.JournalRecord(admit=body)


def finish(group: str, index: int, tokens: int) -> pb.JournalRecord:
    rollout = rollout_pb2.Rollout(
        rollout_id=f"{group}-{index}",
        group_id=group,
        index=index,
        costs=rollout_pb2.Costs(completion_tokens=tokens),
    )
    reward = rewards_pb2.RewardRecord(rollout_id=rollout.rollout_id, reward=1.0)
    return pb.JournalRecord(rollout=pb.JournalRollout(rollout=rollout, reward=reward))


RECORDS = [
    admit("a", 0),
    admit("b", 1),
    admit("c", 2),
    *(finish("a", index, 100) for index in range(2)),
    *(finish("b", index, 250) for index in range(2)),
    *(finish("c", index, tokens) for index, tokens in enumerate((100, 0))),
    pb.JournalRecord(drop=pb.JournalDrop(group_id="b", reason="stale")),
    pb.JournalRecord(drop=pb.JournalDrop(group_id="c", rollout_id="c-1", reason="platform")),
    pb.JournalRecord(batch=pb.JournalBatch(phase="rl", step=1, group_ids=["a", "c"])),
]


def make_ledger() -> Ledger:
    ledger = Ledger()
    for number, record in enumerate(RECORDS, start=1):
        record.sequence = number
        ledger.apply(record)
    return ledger


def test_dropped_rollouts_count_with_their_lengths_and_those_without_tokens_do_not() -> None:
    lengths = make_ledger().lengths
    assert (lengths.trained, lengths.trained_tokens) == (3, 300)
    assert (lengths.lost, lengths.lost_tokens) == (2, 500)
    assert lengths.lost_work_length_ratio == 2.5


def test_rollouts_that_begin_again_count_as_lost() -> None:
    lengths = make_ledger().lengths
    lengths.add_redrawn(2, 100)
    assert lengths.lost_work_length_ratio == pytest.approx(600 / 4 / 100)


def test_without_lost_work_there_is_no_ratio() -> None:
    assert Ledger().lengths.lost_work_length_ratio == 0.0


def test_a_resumed_run_has_the_lengths_of_its_checkpoint() -> None:
    ledger = make_ledger()
    ledger.forget_batch(StepId("rl", 1))
    resumed = resume_ledger(ledger.checkpoint_state(), RECORDS, sequence=len(RECORDS))
    assert resumed.lengths == ledger.lengths
