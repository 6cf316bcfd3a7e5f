"""What rollout workers hand over is checked before the journal sees it."""

from types import SimpleNamespace
from typing import Any

import pytest

from etude.common.api.phases import RolloutPolicy
from etude.common.weights import VersionId
from etude.trainer.controller.segments import encode_record
from etude.trainer.controller.workers import run_order
from etude.trainer.work import GroupOrder, GroupResult
from etude.v1 import environments_pb2, run_pb2
from etude.v1.journal_pb2 import JournalRecord, JournalRollout
from etude.v1.rewards_pb2 import RewardRecord
from etude.v1.rollout_pb2 import Link, Rollout
from etude.v1.weights_pb2 import PolicySpan, PolicyVersion

VERSION = PolicyVersion(epoch=1, number=4)
ORDER = GroupOrder(
    group_id="g",
    task_id="train/t",
    task_uri="file:///tasks/t",
    environment="repos",
    indices=(0,),
    seed=0,
    temperature=1.0,
    targets=(),
    limits=RolloutPolicy(),
)


def scored(**changed: Any) -> JournalRollout:
    link = Link(
        token_ids=[1, 2],
        loss_mask=b"\0\1",
        sampler_logprobs=[0.0, -0.5],
        spans=[PolicySpan(sampled=VERSION, context=VERSION, start=1, end=2)],
    )
    rollout = Rollout(rollout_id="g-0", links=[link], oldest=VERSION, newest=VERSION, **changed)
    return JournalRollout(rollout=rollout, reward=RewardRecord(rollout_id="g-0", reward=1.0))


def run_of(record: JournalRollout, *, driver: str = "process") -> Any:
    """As much of a run as an order needs."""

    async def answer(order: GroupOrder) -> GroupResult:
        data = record.SerializeToString()
        return GroupResult((data,), 0, driver, environments_pb2.ISOLATION_WEAK)

    status = run_pb2.RunStatus()
    status.environments.add(pool="repos", driver="before")
    return SimpleNamespace(
        rollouts=SimpleNamespace(run=answer),
        figures=SimpleNamespace(retried=0),
        moved=lambda: None,
        chat=SimpleNamespace(vocab_size=10),
        book=SimpleNamespace(ledger=SimpleNamespace(versions={VersionId(1, 4): 4})),
        reports=SimpleNamespace(status=status),
    )


async def test_a_sound_rollout_keeps_its_reward() -> None:
    [record] = await run_order(run_of(scored()), ORDER)
    assert record.reward.reward == 1.0


@pytest.mark.parametrize("outcome", ["reward", "fault"])
async def test_a_rollout_that_the_journal_cannot_take_is_masked(outcome: str) -> None:
    given = scored(diff=bytes(17 << 20))
    if outcome == "fault":
        given.reward.fault.reason = "ScoringFailed"
    [record] = await run_order(run_of(given), ORDER)
    assert record.reward.fault.reason == "InvalidRollout"
    assert "the journal takes" in record.rollout.fault
    assert record.rollout.rollout_id == "g-0"
    assert len(encode_record(JournalRecord(sequence=1, rollout=record))) < 1000


async def test_a_rollout_that_the_learner_would_refuse_is_masked() -> None:
    given = scored()
    given.rollout.links[0].loss_mask = b"\1\1"
    [record] = await run_order(run_of(given), ORDER)
    assert record.reward.fault.reason == "InvalidRollout"
    assert "loss_mask" in record.rollout.fault


async def test_an_order_without_an_environment_says_nothing_about_its_pool() -> None:
    run: Any = run_of(scored(), driver="")
    await run_order(run, ORDER)
    assert run.reports.status.environments[0].driver == "before"
