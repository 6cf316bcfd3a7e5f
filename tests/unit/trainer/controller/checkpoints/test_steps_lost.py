"""Steps that the death of a controller costs: with a checkpoint of each step, one at most."""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.support.trainer.dying_store import DyingStore, KilledError
from tests.support.trainer.store_outages import replace_learners
from tests.support.trainer_simulation.workers import SimulatedLearners
from typing_extensions import override

from etude.common.blobs import MemoryStore
from etude.common.checkpoints.manifest import CheckpointObject, stored_checkpoints
from etude.trainer.controller.journal.audit import read_frames
from etude.trainer.controller.run import Run, root_cause
from etude.v1 import journal_pb2

SFT_STEPS = 4
MOST_LIVES = 200


@dataclass(slots=True)
class HeldLearners(SimulatedLearners):
    """Store their state when they may."""

    may_save: asyncio.Event = field(default_factory=asyncio.Event)

    @override
    async def save(self, prefix: str) -> list[CheckpointObject]:
        await self.may_save.wait()
        return await SimulatedLearners.save(self, prefix)


def steps_lost(store: MemoryStore) -> int:
    """Journaled steps that no checkpoint has, over both phases."""
    newest = 0
    for key in [each for each in store.objects if each.startswith("journal/")]:
        for _, payload in read_frames(store.objects[key]):
            record = journal_pb2.JournalRecord.FromString(payload)
            if record.HasField("step"):
                before = SFT_STEPS if record.step.phase == "rl" else 0
                newest = max(newest, before + record.step.step)
    saved = [each.manifest.step for each in stored_checkpoints(store, run="run")]
    return newest - max(saved, default=0)


async def test_a_step_is_trained_while_the_one_before_is_stored_and_journaled_afterwards(
    make_world: Callable[..., Any], uninterrupted: str
) -> None:
    world = make_world(every_steps=1)
    learners = HeldLearners(world.store)
    training = asyncio.create_task(world.train(lambda run: replace_learners(run, learners)))
    async with asyncio.timeout(30):
        while len(learners.trained) < 2:  # noqa: ASYNC110 - a learner without an event
            await asyncio.sleep(0.01)
    for _ in range(100):
        await asyncio.sleep(0)
    run: Run = world.runs[-1]
    assert len(learners.trained) == 2
    assert run.progress.cursor.global_step == 1
    learners.may_save.set()
    assert await training
    assert world.digest == uninterrupted


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("every_steps", "most"), [(1, 1), (2, 3), (3, 5)])
async def test_no_death_costs_more_steps_than_lie_between_two_checkpoints(
    make_world: Callable[..., Any], uninterrupted: str, seed: int, every_steps: int, most: int
) -> None:
    draw = random.Random(seed)
    store = DyingStore()
    world = make_world(store, every_steps=every_steps)
    for _ in range(MOST_LIVES):
        store.revive()
        store.writes_left = draw.randrange(12)
        try:
            assert await world.train()
        except (ExceptionGroup, KilledError) as error:
            assert isinstance(root_cause(error), KilledError)  # noqa: PT017
            assert steps_lost(store) <= most
        else:
            break
    assert world.digest == uninterrupted
    assert world.audit(max_staleness=0).findings == []
