"""Versions that wait for a store that is away: so many and no more, all of them in the end."""

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from tests.support.trainer.store_outages import (
    RL_STEPS,
    SFT_STEPS,
    STALENESS,
    STARTED,
    assert_whole,
    asynchronous,
    away_after,
    chain,
    learner_of,
    replace_learners,
    stalled,
    steps,
)
from tests.support.trainer_simulation.workers import SimulatedLearners
from typing_extensions import override

from etude.common import store_retry, weights
from etude.common.checkpoints.manifest import stored_checkpoints
from etude.common.errors import StoreError
from etude.trainer.controller.admission.groups import RolloutGroup
from etude.trainer.controller.run import Run, root_cause
from etude.trainer.learner import batch_reader, content_spool
from etude.trainer.learner.batches import NonFiniteLossError, PolicyBatch, StepResult

MakeWorld = Callable[..., Any]
FETCHED_STEPS = STALENESS + 1
"""Steps of the groups that may be admitted before the first one."""
chain_groups = itertools.chain.from_iterable


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_retry, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(store_retry, "LONGEST_PAUSE_S", 0.05)


@pytest.mark.parametrize("backlog", [0, 1, 2, 3])
async def test_a_trainer_without_its_store_takes_as_many_steps_as_its_backlog_holds(
    make_world: MakeWorld, backlog: int
) -> None:
    world = asynchronous(make_world, backlog)
    training = asyncio.create_task(world.train(away_after(world, 1)))
    run = await stalled(world)
    trained = len(learner_of(run).trained) - SFT_STEPS
    assert trained == 1 + backlog
    assert len(run.publishing.queue) == 1 + backlog
    assert len(learner_of(run).publisher.waiting) == 1 + backlog
    # Nothing of it is said to exist.
    assert run.progress.cursor.policy == STARTED
    assert run.publishing.served == STARTED
    run.reporter.update_status()
    assert run.reporter.status.reason == StoreError.reason
    assert run.reporter.status.policy_version == STARTED.number
    world.store.away(is_away=False)
    assert await training
    assert steps(chain(world)) == list(range(RL_STEPS + 1))
    assert all(m.base is not None for m in chain(world)[1:])
    assert_whole(world)
    assert len(run.publishing.queue) == 0
    assert not learner_of(run).publisher.waiting


@dataclass(slots=True)
class FetchingLearners(SimulatedLearners):
    """Takes its first step in the second phase once every group that may be admitted is fetched."""

    groups: Callable[[], list[RolloutGroup]] = list

    @override
    async def policy_step(self, batch: PolicyBatch) -> StepResult:
        while len(self.trained) == SFT_STEPS:
            if self.has_fetched_all():
                break
            await asyncio.sleep(0.01)
        return await SimulatedLearners.policy_step(self, batch)

    def has_fetched_all(self) -> bool:
        records = [record for group in self.groups() for record in group.finished.values()]
        keys = {record.content.tokens.key for record in records}
        return len(keys) == FETCHED_STEPS * 2 * 3 == self.spool.count(keys)


async def test_steps_whose_rollouts_were_fetched_are_taken_while_these_are_away_in_the_store(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (batch_reader, content_spool):
        monkeypatch.setattr(module, "LONGEST_PAUSE_S", 0.2)
    world = asynchronous(make_world, 2)
    world.store.only, world.store.spared = "contents/", ()

    def prepare(run: Run) -> None:
        learners = FetchingLearners(world.store)
        ledger = run.book.ledger
        learners.groups = lambda: [*chain_groups(ledger.batches.values()), *ledger.live.values()]
        replace_learners(run, learners)
        away_after(world, 1)(run)

    training = asyncio.create_task(world.train(prepare))
    while not world.runs or len(learner_of(world.runs[-1]).trained) < SFT_STEPS + FETCHED_STEPS:
        assert not training.done()
        await asyncio.sleep(0.05)
    # The groups of the last step cannot even be written.
    await asyncio.sleep(0.3)
    assert len(learner_of(world.runs[-1]).trained) == SFT_STEPS + FETCHED_STEPS
    assert not training.done()
    world.store.away(is_away=False)
    assert await training
    assert steps(chain(world)) == list(range(RL_STEPS + 1))
    assert_whole(world)


async def test_no_version_is_seen_before_the_batches_that_led_to_it_are_durable(
    make_world: MakeWorld,
) -> None:
    world = asynchronous(make_world, 2)
    world.store.only = "journal/"
    training = asyncio.create_task(world.train(away_after(world, 1)))
    run = await stalled(world)
    # The batch of the first step was durable; nobody may see what came after it.
    assert steps(chain(world))[-1] == 1
    assert len(run.publishing.queue) == 3
    assert len(learner_of(run).trained) == SFT_STEPS + 4
    world.store.away(is_away=False)
    assert await training
    assert steps(chain(world)) == list(range(RL_STEPS + 1))
    assert_whole(world)


async def test_a_run_ends_in_order_if_its_store_is_away_at_the_last_step(
    make_world: MakeWorld,
) -> None:
    world = asynchronous(make_world, 2)
    training = asyncio.create_task(world.train(away_after(world, RL_STEPS)))
    run = await stalled(world)
    assert not training.done()
    world.store.away(is_away=False)
    assert await training
    assert chain(world)[-1].step == run.progress.cursor.global_step == SFT_STEPS + RL_STEPS
    assert_whole(world)


async def test_a_run_that_is_told_to_stop_saves_a_checkpoint_of_its_newest_version(
    make_world: MakeWorld,
) -> None:
    world = asynchronous(make_world, 3)
    training = asyncio.create_task(world.train(away_after(world, 1)))
    run = await stalled(world)
    run.commands.request_stop()
    await asyncio.sleep(0.2)
    assert not training.done()
    world.store.away(is_away=False)
    assert not await training
    assert (
        chain(world)[-1].step == run.progress.cursor.global_step == run.checkpoints.saver.last_step
    )
    assert await world.train()
    assert_whole(world)


async def test_checkpoints_and_evaluations_are_of_the_version_of_their_step(
    make_world: MakeWorld,
) -> None:
    world = asynchronous(make_world, 8)
    world.spec["checkpointing"]["everySteps"] = 3
    world.spec["evaluation"] = make_world().spec["evaluation"]
    world.spec["evaluation"][0]["everySteps"] = 2
    training = asyncio.create_task(world.train(away_after(world, 1)))
    run = await stalled(world)
    # Nothing is in flight when an evaluation begins.
    assert len(learner_of(run).trained) == SFT_STEPS + 2
    world.store.away(is_away=False)
    assert await training
    assert [row["step"] for row in world.rows("eval")] == [0, 2, 4, 6]
    at = {m.step: m.number for m in chain(world)}
    for found in stored_checkpoints(world.store, run="run"):
        if found.manifest.step > SFT_STEPS:
            assert found.manifest.policy_version == at[found.manifest.step]
    assert_whole(world)


@dataclass(slots=True)
class Diverging(SimulatedLearners):
    """Has no third step in the second phase."""

    @override
    async def policy_step(self, batch: PolicyBatch) -> StepResult:
        if len(self.trained) == SFT_STEPS + 2:
            raise NonFiniteLossError("the loss is NaN")
        return await SimulatedLearners.policy_step(self, batch)


async def test_a_run_that_fails_for_good_publishes_what_was_good(make_world: MakeWorld) -> None:
    world = asynchronous(make_world, 2)

    def prepare(run: Run) -> None:
        replace_learners(run, Diverging(world.store))
        away_after(world, 1)(run)

    training = asyncio.create_task(world.train(prepare))
    await stalled(world)
    assert weights.newest_version(world.store.inner) == STARTED
    world.store.away(is_away=False)
    with pytest.raises(ExceptionGroup) as caught:
        await training
    assert isinstance(root_cause(caught.value), NonFiniteLossError)
    assert steps(chain(world)) == [0, 1, 2]
