"""Checkpoints are stored beside the steps, and whole whenever a controller stalls or dies."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.support.trainer.dying_store import DyingStore, KilledError
from tests.support.trainer.store_outages import replace_learners
from tests.support.trainer_simulation.workers import SimulatedLearners
from typing_extensions import override

from etude.common.blobs import MemoryStore, ObjectInfo
from etude.common.checkpoints.manifest import (
    MANIFEST,
    CheckpointManifest,
    CheckpointObject,
    check_digests,
    list_unfinished,
    stored_checkpoints,
    write_manifest,
)
from etude.common.errors import FencedError
from etude.common.weights import claim_epoch
from etude.trainer.controller.checkpoints.state import read_state
from etude.trainer.controller.run import Run, root_cause
from etude.v1 import run_pb2

PREFIX = "checkpoints/000000000004/"
SUCCESSORS = (PREFIX + "000002/learner/state.json", PREFIX + "model/config.json")


@dataclass
class OvertakenStore(MemoryStore):
    """In which a successor takes over and saves at one point of a checkpoint."""

    point: str = ""

    def _overtake(self, point: str) -> bool:
        if self.point != point:
            return False
        self.point = ""
        claim_epoch(self, holder="successor", parent=None, reason="takeover")
        for key in SUCCESSORS:
            MemoryStore.put(self, key, b"{}")
        return True

    @override
    def create(self, key: str, data: bytes) -> None:
        if key == PREFIX + MANIFEST and self._overtake("late manifest"):
            manifest = CheckpointManifest.model_validate_json(data)
            write_manifest(self, manifest.model_copy(update={"epoch": 2}))
        MemoryStore.create(self, key, data)
        if key == PREFIX + MANIFEST:
            self._overtake("manifest")

    @override
    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        if prefix == PREFIX:
            self._overtake("rests")
        return MemoryStore.list(self, prefix, after)


@contextlib.asynccontextmanager
async def journal_of(run: Run) -> AsyncIterator[None]:
    """A run's journal is written meanwhile."""
    journal = asyncio.create_task(run.book.journal.run())
    async with asyncio.timeout(30):
        yield
    journal.cancel()
    await asyncio.gather(journal, return_exceptions=True)


async def save(run: Run) -> None:
    """One scheduled checkpoint, to its end."""
    await run.checkpoints.save_checkpoint("Scheduled")
    await run.checkpoints.wait_stored()


@pytest.mark.parametrize("point", ["late manifest", "manifest", "rests"])
async def test_a_controller_that_stalls_while_it_saves_harms_nothing_of_its_successor(
    make_world: Callable[..., Any], point: str
) -> None:
    store = OvertakenStore()
    run, _, _ = make_world(store).start()
    store.put(PREFIX + "000001/rest", b"")
    run.progress.cursor.phase, run.progress.cursor.global_step = "sft", 4
    store.point = point
    async with journal_of(run):
        if point != "rests":
            with pytest.raises(FencedError):
                await save(run)
            [found] = stored_checkpoints(store, run="run")
            assert found.manifest.epoch == (2 if point == "late manifest" else 1)
        else:
            await save(run)
            assert PREFIX + "000001/rest" not in store.objects
    assert set(SUCCESSORS) <= store.objects.keys()


@dataclass
class LateStore(MemoryStore):
    """Takes the first manifest only once a successor has deleted what has none."""

    is_late: bool = True

    @override
    def create(self, key: str, data: bytes) -> None:
        if key.endswith(MANIFEST) and self.is_late:
            self.is_late = False
            claim_epoch(self, holder="successor", parent=None, reason="takeover")
            MemoryStore.delete(self, list_unfinished(self, epoch=2))
        MemoryStore.create(self, key, data)


async def test_a_manifest_that_lands_when_its_objects_are_deleted_is_never_announced(
    make_world: Callable[..., Any], uninterrupted: str
) -> None:
    world = make_world(LateStore(), every_steps=2)
    with pytest.raises(ExceptionGroup) as caught:
        await world.train()
    assert isinstance(root_cause(caught.value), FencedError)
    assert [each.manifest.step for each in stored_checkpoints(world.store, run="run")] == [2]
    world.spec["checkpointing"]["everySteps"] = 100
    assert await world.train()
    assert world.digest == uninterrupted
    happenings = world.runs[-1].reporter.reports._happenings
    announced = [each.checkpoint.step for each in happenings if each.HasField("checkpoint")]
    assert announced == [4, 10]


@dataclass(slots=True)
class SlowLearners(SimulatedLearners):
    """Store a scheduled state only once the next step is done."""

    has_stepped: asyncio.Event = field(default_factory=asyncio.Event)

    @override
    async def save(self, prefix: str) -> list[CheckpointObject]:
        if prefix.startswith(SCHEDULED):
            self.has_stepped.clear()
            await self.has_stepped.wait()
        return await SimulatedLearners.save(self, prefix)


SCHEDULED = tuple(f"checkpoints/{step:012d}/" for step in (2, 6, 8))


async def test_steps_go_on_while_a_checkpoint_of_their_start_is_stored(
    make_world: Callable[..., Any], uninterrupted: str
) -> None:
    world = make_world(every_steps=2)

    def prepare(run: Run) -> None:
        learners = SlowLearners(world.store)
        learners.after_step = learners.has_stepped.set
        replace_learners(run, learners)

    assert await world.train(prepare)
    assert world.digest == uninterrupted
    trained = world.runs[0].learners.trained
    found = list(stored_checkpoints(world.store, run="run"))
    assert [each.manifest.step for each in found] == [2, 4, 6, 8, 10]
    for each in found:
        check_digests(world.store, each)
        folder = each.prefix + each.manifest.state_folder
        learner = json.loads(world.store.get(f"{folder}learner/state.json"))
        assert learner["weights"] == trained[each.manifest.step - 1]
        assert read_state(world.store, each).cursor.global_step == each.manifest.step


@pytest.mark.parametrize("writes", range(7))
async def test_a_controller_that_dies_between_two_writes_leaves_whole_checkpoints_only(
    make_world: Callable[..., Any], uninterrupted: str, writes: int
) -> None:
    """Those are the three of a scheduled checkpoint, and the four of one with the model."""
    store = DyingStore(writes_left=writes)
    world = make_world(store, every_steps=2)
    with pytest.raises((ExceptionGroup, KilledError)) as caught:
        await world.train()
    assert isinstance(root_cause(caught.value), KilledError)
    found = list(stored_checkpoints(store, run="run"))
    assert [each.manifest.step for each in found] == [2] * (writes >= 3)
    for each in found:
        check_digests(store, each)
    store.revive()
    world.spec["checkpointing"]["everySteps"] = 100
    assert await world.train()
    assert world.digest == uninterrupted
    assert world.audit(max_staleness=0).findings == []
    # What the first controller left of a checkpoint without manifest is gone.
    found = list(stored_checkpoints(store, run="run"))
    named = {
        c.prefix + key for c in found for key in [MANIFEST, *(o.key for o in c.manifest.objects)]
    }
    assert {info.key for info in store.list("checkpoints/")} == named


async def test_an_export_of_a_checkpoint_that_was_never_finished_is_deleted(
    make_world: Callable[..., Any], uninterrupted: str
) -> None:
    store = DyingStore(writes_left=2)
    world = make_world(store, every_steps=100)

    def ask(run: Run) -> None:
        now = run_pb2.CheckpointNow(request="a")
        run.commands.accept(run_pb2.CommandRequest(command_id="1", checkpoint=now))

    with pytest.raises((ExceptionGroup, KilledError)):
        await world.train(ask)
    step = "checkpoints/000000000001/"
    assert {step + "model/config.json"} < {info.key for info in store.list(step)}
    store.revive()
    assert await world.train()
    assert world.digest == uninterrupted
    assert list(store.list(step)) == []


async def test_a_second_attempt_at_a_step_overwrites_nothing_that_a_manifest_names(
    make_world: Callable[..., Any],
) -> None:
    store = DyingStore(stays_dead=False)
    run, _, _ = make_world(store).start()
    run.progress.cursor.phase, run.progress.cursor.global_step = "sft", 4
    async with journal_of(run):
        await save(run)
        # Learner, controller, and a manifest that is tried to be created before it is replaced.
        for writes in range(5):
            run.learners.weights = f"of attempt {writes}"
            store.writes_left = writes
            with pytest.raises(KilledError):
                await save(run)
            store.revive()
            [found] = stored_checkpoints(store, run="run")
            check_digests(store, found)
            folder = found.prefix + found.manifest.state_folder
            learner = json.loads(store.get(f"{folder}learner/state.json"))
            assert learner["weights"] == ("of attempt 4" if writes == 4 else "initial")
        await save(run)
    [found] = stored_checkpoints(store, run="run")
    named = {MANIFEST, *(each.key for each in found.manifest.objects)}
    assert {info.key for info in store.list(PREFIX)} == {PREFIX + key for key in named}


@dataclass(slots=True)
class HeldLearners(SimulatedLearners):
    """Store their state when they may."""

    may_save: asyncio.Event = field(default_factory=asyncio.Event)

    @override
    async def save(self, prefix: str) -> list[CheckpointObject]:
        await self.may_save.wait()
        return await SimulatedLearners.save(self, prefix)


@dataclass(slots=True)
class StuckLearners(HeldLearners):
    """Store one state when they may, and never another."""

    num_saves: int = 0

    @override
    async def save(self, prefix: str) -> list[CheckpointObject]:
        self.num_saves += 1
        if self.num_saves > 1:
            await asyncio.Event().wait()
        return await HeldLearners.save(self, prefix)


@pytest.mark.parametrize("step", [4, 5])
async def test_a_stop_waits_for_what_is_being_stored_and_saves_newer_steps_within_one_time_out(
    make_world: Callable[..., Any], step: int
) -> None:
    store = MemoryStore()
    run, _, _ = make_world(store, checkpointing={"timeoutSeconds": 600}).start()
    learners = StuckLearners(store)
    replace_learners(run, learners)
    run.progress.cursor.phase, run.progress.cursor.global_step = "sft", 4
    async with journal_of(run):
        await run.checkpoints.save_checkpoint("Scheduled")
        run.progress.cursor.global_step = step
        run.commands.request_stop()
        run.commands.stop_requested_s -= 599.9
        run.commands.request_stop()  # a signal after a command
        learners.may_save.set()
        assert await run.checkpoints.step_boundary()
    assert [each.manifest.step for each in stored_checkpoints(store, run="run")] == [4]
    assert learners.num_saves == 1 or step == 5
    events = [each.event for each in run.reporter.reports._happenings if each.HasField("event")]
    assert [each.reason for each in events] == ["CheckpointFailed"] * (step - 4)


async def test_a_rollback_gives_up_the_checkpoint_that_is_being_stored(
    make_world: Callable[..., Any],
) -> None:
    store = MemoryStore()
    run, _, _ = make_world(store).start()
    learners = HeldLearners(store)
    replace_learners(run, learners)
    run.progress.cursor.phase, run.progress.cursor.global_step = "sft", 4
    async with journal_of(run):
        await run.checkpoints.save_checkpoint("Scheduled")

        async def claim() -> int:
            return claim_epoch(store, holder="test", parent=None, reason="rollback", after=1)

        assert await run.book.journal.open_epoch(claim) == 2
        learners.may_save.set()
        await run.checkpoints.wait_stored()
    assert list(stored_checkpoints(store, run="run")) == []
    events = [each.event for each in run.reporter.reports._happenings if each.HasField("event")]
    assert [each.reason for each in events] == ["CheckpointFailed"]
    assert "epoch 2 was opened meanwhile" in events[0].message


async def test_a_checkpoint_that_is_too_slow_is_reported_and_the_next_one_is_stored(
    make_world: Callable[..., Any],
) -> None:
    store = MemoryStore()
    run, _, _ = make_world(store, checkpointing={"timeoutSeconds": 1}).start()
    replace_learners(run, HeldLearners(store))
    run.progress.cursor.phase, run.progress.cursor.global_step = "sft", 4
    async with journal_of(run):
        await save(run)
        assert list(stored_checkpoints(store, run="run")) == []
        replace_learners(run, SimulatedLearners(store))
        await save(run)
    [found] = stored_checkpoints(store, run="run")
    check_digests(store, found)
