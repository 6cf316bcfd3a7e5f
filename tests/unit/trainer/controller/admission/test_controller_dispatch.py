"""What rollout workers hand over is checked before the journal sees it."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from typing_extensions import override

from etude.common.api.run.rollout_policy import RolloutPolicy
from etude.common.weights import VersionId
from etude.trainer.controller.journal.record_parts import PART_BYTES
from etude.trainer.controller.journal.segments import encode_record
from etude.trainer.controller.run import Run
from etude.trainer.rollouts.protocol import GroupRequest, GroupResult, RolloutWorkers
from etude.trainer.routing.table import RoutingTable
from etude.v1 import environments_pb2
from etude.v1.journal_pb2 import JournalRecord, JournalRollout
from etude.v1.rewards_pb2 import RewardRecord
from etude.v1.rollout_pb2 import Link, Rollout
from etude.v1.weights_pb2 import PolicySpan, PolicyVersion

VERSION = PolicyVersion(epoch=1, number=4)
ORDER = GroupRequest(
    group_id="g",
    task_id="train/t",
    task_uri="file:///tasks/t",
    environment="repos",
    indices=(0,),
    seed=0,
    temperature=1.0,
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


@dataclass(slots=True)
class Answering(RolloutWorkers):
    """Brings one record, whatever is ordered."""

    record: JournalRollout
    driver: str

    @override
    async def run(self, order: GroupRequest) -> GroupResult:
        data = self.record.SerializeToString()
        return GroupResult((data,), 0, self.driver, environments_pb2.ISOLATION_WEAK)

    @property
    @override
    def num_workers(self) -> int:
        return 1

    @override
    async def update_routing(self, table: RoutingTable) -> None:
        """Run no worker."""


@pytest.fixture
def run(make_world: Callable[..., Any]) -> Run:
    made: Run = make_world().start()[0]
    made.book.ledger.versions[VersionId(1, 4)] = 4
    return made


async def order(
    run: Run, record: JournalRollout, *, driver: str = "process"
) -> list[JournalRollout]:
    run.dispatcher.workers = Answering(record, driver)
    return [each.record.rollout for each in await run.dispatcher.run_group(ORDER)]


async def test_a_sound_rollout_keeps_its_reward(run: Run) -> None:
    [record] = await order(run, scored())
    assert record.reward.reward == 1.0


@pytest.mark.parametrize("outcome", ["reward", "fault"])
async def test_a_rollout_that_inflates_its_record_keeps_its_tokens_and_its_outcome(
    run: Run, outcome: str
) -> None:
    given = scored(diff=bytes(65 << 20))
    if outcome == "fault":
        given.reward.fault.reason = "ScoringFailed"
    [record] = await order(run, given)
    assert record.reward.WhichOneof("result") == outcome
    assert record.rollout.links == given.rollout.links
    assert len(encode_record(JournalRecord(sequence=1, rollout=record))) < 1000


async def test_a_rollout_that_the_learner_would_refuse_is_masked(run: Run) -> None:
    given = scored()
    given.rollout.links[0].loss_mask = b"\1\1"
    [record] = await order(run, given)
    assert record.reward.fault.reason == "InvalidRollout"
    assert "loss_mask" in record.rollout.fault


class ThreadNotingVersions(dict[VersionId, int]):
    """Notes the threads that look a version up."""

    def __init__(self) -> None:
        super().__init__({VersionId(1, 4): 4})
        self.threads: set[int] = set()

    @override
    def get(self, key: VersionId, default: Any = None) -> Any:
        self.threads.add(threading.get_ident())
        return super().get(key, default)


@pytest.mark.parametrize(("size", "is_large"), [(10, False), (2 << 20, True), (9 << 20, True)])
async def test_large_records_are_read_and_serialised_in_a_thread(
    run: Run, size: int, *, is_large: bool
) -> None:
    versions = run.book.ledger.versions = ThreadNotingVersions()
    run.dispatcher.workers = Answering(scored(diff=bytes(size)), "process")
    [prepared] = await run.dispatcher.run_group(ORDER)
    assert prepared.record.rollout.reward.reward == 1.0
    assert (threading.get_ident() not in versions.threads) == is_large
    # What is journaled in parts must not be serialised on the event loop.
    assert (prepared.data is not None) == (size > PART_BYTES)


async def test_an_order_without_an_environment_says_nothing_about_its_pool(run: Run) -> None:
    await order(run, scored())
    await order(run, scored(), driver="")
    [pool] = run.reporter.status.environments
    assert pool.driver == "process"
