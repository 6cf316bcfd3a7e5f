"""Rollouts for people are written from the store, whoever of the workers does it."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.support.trainer_simulation.workers import SimulatedLearners, SimulatedRollouts
from typing_extensions import override

from etude.agent.chat import ChatFormat
from etude.common.api.run.rollout_policy import RolloutPolicy
from etude.common.blobs import MemoryStore
from etude.common.checkpoints.manifest import stored_checkpoints
from etude.common.run_folder.record import StoreRecord
from etude.common.weights import VersionId
from etude.trainer.controller.run import Run
from etude.trainer.rollouts.contents.readable_rows import write_readable_rollouts
from etude.trainer.rollouts.protocol import GroupRequest, WorkerLostError
from etude.trainer.routing.table import Purpose
from etude.v1.journal_pb2 import JournalRollout

MakeWorld = Callable[..., Any]
STEP = 7
SFT_STEPS = 4


async def finish(store: MemoryStore, purpose: Purpose = Purpose.TRAINING) -> list[bytes]:
    """Records of a group whose tokens and calls are in a store."""
    order = GroupRequest(
        group_id="g",
        task_id="t",
        task_uri="file:///t",
        environment="repos",
        indices=(0, 1),
        seed=5,
        temperature=1.0,
        limits=RolloutPolicy(),
        purpose=purpose,
    )
    workers = SimulatedRollouts(lambda: VersionId(1, 1), store=store)
    workers.final_message = lambda index: f"Done {index}."
    return list((await workers.run(order)).records)


def rows(store: MemoryStore, split: str = "train") -> list[dict[str, Any]]:
    return list(StoreRecord(store).rollouts(STEP, split))


def write(
    store: MemoryStore, chat: ChatFormat, records: Sequence[bytes], split: str = "train"
) -> None:
    write_readable_rollouts(store, chat, STEP, split, records)


@pytest.mark.parametrize("part", ["tokens", "calls"])
async def test_a_rollout_that_cannot_be_read_costs_its_own_turns_alone(
    chat: ChatFormat, part: str
) -> None:
    store = MemoryStore()
    records = await finish(store)
    content = JournalRollout.FromString(records[0]).content
    key = getattr(content, part).key
    del store.objects[key]
    write(store, chat, records)
    first, second = rows(store)
    assert key in first["unreadable"]
    assert first["turns"] == []
    assert first["tokens"] == sum(link.tokens for link in content.links)
    assert "reward" in first
    assert "edits_without_evidence" not in first
    assert second["turns"]
    assert "unreadable" not in second


async def test_a_worker_that_died_before_it_had_deleted_all_tokens_is_repeated_without_loss(
    chat: ChatFormat,
) -> None:
    store = MemoryStore()
    records = await finish(store, Purpose.EVALUATION)
    kept = dict(store.objects)
    write(store, chat, records, "eval-x")
    whole = rows(store, "eval-x")
    assert all(row["turns"] for row in whole)
    assert not [key for key in store.objects if key.startswith("contents")]
    # It died between two deletions.
    last = max(kept)
    store.objects[last] = kept[last]
    write(store, chat, records, "eval-x")
    assert rows(store, "eval-x") == whole
    assert last not in store.objects


@dataclass(slots=True)
class DyingWriters(SimulatedRollouts):
    """Lose the first writes of each step."""

    losses: int = 3
    writes: dict[tuple[int, str], int] = field(default_factory=dict)

    @override
    async def write_rollouts(self, step: int, split: str, records: Sequence[bytes]) -> None:
        count = self.writes[step, split] = self.writes.get((step, split), 0) + 1
        if count <= self.losses:
            raise WorkerLostError("the rollout worker that wrote them died")
        await SimulatedRollouts.write_rollouts(self, step, split, records)


async def test_another_worker_writes_what_a_dead_one_did_not(make_world: MakeWorld) -> None:
    world = make_world()

    def prepare(run: Run) -> None:
        workers = run.dispatcher.workers
        assert isinstance(workers, SimulatedRollouts)
        run.dispatcher.workers = DyingWriters(
            workers.serving, store=workers.store, chat=workers.chat
        )

    assert await world.train(prepare)
    assert set(StoreRecord(world.store).splits()) == {
        *((step, "train") for step in range(5, 11)),
        *((step, "eval-held-out") for step in (4, 7, 10)),
        *((step, "eval-held-out-greedy") for step in (4, 10)),
    }
    assert not [key for key in world.store.objects if key.startswith("contents-of-evaluations/")]


@dataclass(slots=True)
class SlowWriters(SimulatedRollouts):
    """Take a while to write."""

    @override
    async def write_rollouts(self, step: int, split: str, records: Sequence[bytes]) -> None:
        await asyncio.sleep(0.3)
        await SimulatedRollouts.write_rollouts(self, step, split, records)


async def test_a_checkpoint_waits_for_the_readable_rollouts_of_its_steps(
    make_world: MakeWorld,
) -> None:
    world = make_world(every_steps=1)

    def prepare(run: Run) -> None:
        workers, learners = run.dispatcher.workers, run.learners
        assert isinstance(workers, SimulatedRollouts)
        assert isinstance(learners, SimulatedLearners)
        run.dispatcher.workers = SlowWriters(
            workers.serving, store=workers.store, chat=workers.chat
        )
        learners.steps_until_crash = SFT_STEPS + 3
        learners.before_crash = run.checkpoints.wait_stored

    with pytest.raises(ExceptionGroup):
        await world.train(prepare)
    written = {step for step, split in StoreRecord(world.store).splits() if split == "train"}
    newest = max(each.manifest.step for each in stored_checkpoints(world.store, run="run"))
    assert newest > SFT_STEPS
    assert written >= set(range(SFT_STEPS + 1, newest + 1))
