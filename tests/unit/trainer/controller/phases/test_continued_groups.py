"""Groups whose worker or controller died are sent again as groups that go on."""

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.support.trainer_simulation.workers import SimulatedLearners, SimulatedRollouts
from typing_extensions import override

from etude.common.api.run.rollout_policy import RolloutPolicy
from etude.common.blobs import MemoryStore, ObjectInfo
from etude.common.weights import VersionId
from etude.trainer.controller.admission.dropping import drop_rollout
from etude.trainer.controller.checkpoints.recovery import JournaledLedger
from etude.trainer.controller.journal import write_ahead_log
from etude.trainer.controller.program import train
from etude.trainer.controller.run import Run
from etude.trainer.rollouts.protocol import (
    GroupRequest,
    GroupResult,
    RolloutWorkers,
    WorkerLostError,
)
from etude.trainer.rollouts.trajectories.resume_counts import Resume, ResumeCause, ResumeCounts
from etude.trainer.routing.table import RoutingTable
from etude.v1 import environments_pb2

MakeWorld = Callable[..., Any]
SFT_STEPS = 4

ORDER = GroupRequest(
    group_id="g",
    task_id="train/t",
    task_uri="file:///tasks/t",
    environment="repos",
    indices=(),
    seed=0,
    temperature=1.0,
    limits=RolloutPolicy(),
)


@dataclass(slots=True)
class DyingWorkers(RolloutWorkers):
    """Lose a request twice, then say how its rollouts went on."""

    orders: list[GroupRequest] = field(default_factory=list)

    @override
    async def run(self, order: GroupRequest) -> GroupResult:
        self.orders.append(order)
        if len(self.orders) < 3:
            raise WorkerLostError("its rollout worker died and was restarted")
        counts = ResumeCounts()
        counts.add(Resume.CONTINUED, ResumeCause.WORKER)
        counts.add_redrawn(ResumeCause.DIVERGED, 40)
        weak = environments_pb2.ISOLATION_WEAK
        return GroupResult((), 0, "process", weak, resumes=counts)

    @property
    @override
    def num_workers(self) -> int:
        return 1

    @override
    async def update_routing(self, table: RoutingTable) -> None:
        """Run no worker."""


async def test_a_group_of_a_worker_that_died_is_sent_as_one_that_goes_on(
    make_world: MakeWorld,
) -> None:
    run: Run = make_world().start()[0]
    workers = run.dispatcher.workers = DyingWorkers()

    await run.dispatcher.run_group(ORDER)

    sent = [(each.dispatch, each.is_continued) for each in workers.orders]
    assert sent == [(0, False), (1, True), (2, True)]
    assert {each.epoch for each in workers.orders} == {run.progress.epoch}
    assert run.progress.figures.resumed == {"continued": 1, "replayed": 0, "redrawn": 1}
    assert (run.book.ledger.lengths.lost, run.book.ledger.lengths.lost_tokens) == (1, 40)


@dataclass(slots=True)
class LosingWorkers(SimulatedRollouts):
    """Workers on which a finished rollout of the first group turns out to be suspect."""

    book: JournaledLedger | None = None

    @override
    async def run(self, order: GroupRequest) -> GroupResult:
        first, second = "rl-000000", "rl-000001"
        if order.group_id == second and self.book is not None:
            while not self.book.ledger.live[first].finished:  # noqa: ASYNC110 - no event says it
                await asyncio.sleep(0.001)
            drop_rollout(self.book, self.book.ledger.live[first], f"{first}-1", "suspect_policy")
        return await super(LosingWorkers, self).run(order)


async def test_a_group_that_the_same_controller_draws_again_does_not_go_on(
    make_world: MakeWorld,
) -> None:
    world = make_world()

    def prepare(run: Run) -> None:
        run.dispatcher.workers = LosingWorkers(
            lambda: run.publishing.served or VersionId(0, 0), book=run.book
        )

    assert await world.train(prepare)
    orders = world.runs[-1].dispatcher.workers.orders
    _, again = [each for each in orders if each.group_id == "rl-000000"]
    assert again.indices == (1,)
    assert again.rollout_id(1) == "rl-000000-1-again1"
    assert not again.is_continued


async def test_groups_of_a_controller_that_died_go_on_and_new_ones_begin(
    make_world: MakeWorld,
) -> None:
    world = make_world(staleness=2)
    run, sets, checkpoint = world.start()
    run.learners.steps_until_crash, run.dispatcher.workers.longest_s = 5, 0.3
    with pytest.raises(ExceptionGroup):
        await train(run, sets, checkpoint=checkpoint)
    await world.train()

    before, after = (
        [each for each in run.dispatcher.workers.orders if each.group_id.startswith("rl-")]
        for run in world.runs
    )
    known = {each.group_id for each in before}
    assert any(each.is_continued for each in after)
    assert not any(each.is_continued for each in after if each.group_id not in known)
    assert not any(each.is_continued for each in before)
    assert {each.epoch for each in before} < {each.epoch for each in before + after}
    live = world.runs[-1].book.ledger.live
    assert not live


class SlowListing(MemoryStore):
    """Takes long to list what earlier attempts at a group left."""

    @override
    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        if prefix.startswith("contents/rl-"):
            time.sleep(0.2)
        return super().list(prefix, after)


async def test_a_rollout_without_a_reward_is_not_trained_while_leftovers_are_collected(
    make_world: MakeWorld,
) -> None:
    def die_with_groups_under_way(run: Run) -> None:
        workers, learners = run.dispatcher.workers, run.learners
        assert isinstance(workers, SimulatedRollouts)
        assert isinstance(learners, SimulatedLearners)
        workers.longest_s, learners.steps_until_crash = 1.0, SFT_STEPS

    world = make_world(SlowListing(), staleness=2, fault_share=0.2)
    with pytest.raises(ExceptionGroup):
        await world.train(die_with_groups_under_way)
    assert await world.train()
    sent = [each for each in world.runs[-1].dispatcher.workers.orders if each.is_continued]
    names = {each.group_id for each in sent}
    faults = [
        each
        for each in write_ahead_log.recover_records(
            world.store, run_uid="run", before_epoch=99, since=0
        ).records
        if each.drop.reason == "platform" and each.drop.group_id in names
    ]
    assert faults, "no group of which leftovers are collected has a fault"
    assert world.audit(max_staleness=2).findings == []
