"""A run beside other controllers, stores that are away, and partners that fail."""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.support.trainer.store_outages import replace_learners
from tests.support.trainer_simulation.workers import SimulatedLearners
from typing_extensions import override

from etude.common.api.run.spec import RLRunSpec
from etude.common.blobs import MemoryStore
from etude.common.checkpoints.manifest import (
    check_digests,
    first_intact,
    list_checkpoints,
    stored_checkpoints,
)
from etude.common.errors import FencedError, StoreError, UserError
from etude.common.weights import VersionId
from etude.trainer.controller.checkpoints.recovery import open_run
from etude.trainer.controller.phases.evaluation import Evaluator
from etude.trainer.controller.phases.guards import InfraFailuresError, MismatchError
from etude.trainer.controller.program import train
from etude.trainer.controller.run import Run, root_cause
from etude.v1 import run_pb2

SFT_STEPS = 4
RL_STEPS = 6

MakeWorld = Callable[..., Any]


async def test_falling_back_over_the_end_of_a_phase_keeps_the_batches_of_the_next(
    make_world: MakeWorld,
) -> None:
    given = make_world().spec
    second = {**given["phases"][1], "name": "more", "maxSteps": 4}
    given["phases"].append(second)
    whole = make_world(given=given)
    assert await whole.train()
    world = make_world(given=given)
    await world.crash(after=SFT_STEPS + RL_STEPS + 1)
    end = f"checkpoints/{SFT_STEPS + RL_STEPS:012d}/000001/"
    [state] = [k for k in world.store.objects if k.startswith(end) and k.endswith("state.json")]
    world.store.objects[state] = b"garbage"
    assert await world.train()
    assert world.digest == whole.digest
    assert world.audit(max_staleness=0).findings == []


async def test_lost_rollouts_are_masked_and_accounted_for(make_world: MakeWorld) -> None:
    world = make_world(fault_share=0.1)
    await world.crash(after=SFT_STEPS + 3)
    assert await world.train()
    found = world.audit(max_staleness=0)
    assert found.findings == []
    assert found.dropped["platform"] > 0
    assert found.trained + found.dropped.total() == found.accepted == 36
    assert sum(r.get("masked", 0) for r in world.rows("step")) == found.dropped["platform"]


async def test_too_many_lost_rollouts_stop_the_run_with_the_reason(make_world: MakeWorld) -> None:
    world = make_world(fault_share=0.9)
    with pytest.raises(ExceptionGroup) as caught:
        await world.train()
    error = root_cause(caught.value)
    assert isinstance(error, InfraFailuresError)
    assert "maxInfraFailurePercent 40" in str(error)
    assert "simulated" in str(error)


@pytest.mark.parametrize(("dtype", "mismatch"), [("Float32", 2e-3), ("BFloat16", 0.2)])
async def test_engine_and_learner_that_disagree_stop_the_run(
    make_world: MakeWorld, dtype: str, mismatch: float
) -> None:
    def prepare(run: Run) -> None:
        assert isinstance(run.learners, SimulatedLearners)
        run.learners.mismatch = mismatch

    world = make_world(weights={"dtype": dtype})
    with pytest.raises(ExceptionGroup) as caught:
        await world.train(prepare)
    assert isinstance(root_cause(caught.value), MismatchError)
    # The update that was made from wrong samples is not published.
    manifests = [k for k in world.store.objects if k.startswith("weights/manifests/")]
    assert len(manifests) == 2


@pytest.mark.parametrize(("current", "stale"), [(2e-3, 0.0), (0.0, 1.5), (math.nan, 0.0)])
async def test_asynchronous_modes_stop_for_a_mismatch_too(
    make_world: MakeWorld, current: float, stale: float
) -> None:
    def prepare(run: Run) -> None:
        assert isinstance(run.learners, SimulatedLearners)
        run.learners.mismatch, run.learners.stale_mismatch = current, stale

    world = make_world(staleness=2)
    with pytest.raises(ExceptionGroup) as caught:
        await world.train(prepare)
    assert isinstance(root_cause(caught.value), MismatchError)


async def test_drift_of_older_weights_is_no_mismatch(make_world: MakeWorld) -> None:
    def prepare(run: Run) -> None:
        assert isinstance(run.learners, SimulatedLearners)
        run.learners.stale_mismatch = 0.3

    world = make_world(staleness=2)
    assert await world.train(prepare)
    rows = [row for row in world.rows("step") if "mismatch_current" in row]
    assert len(rows) == RL_STEPS
    # A step without tokens of the current version says so, and does not report a gap of 0.
    for row in rows:
        assert (row["mismatch_current"] is None) == (row["mismatch_current_tokens"] == 0)
    assert rows[0]["mismatch_current"] == 0.0


async def test_a_newer_controller_stops_the_older_one(
    make_world: MakeWorld, uninterrupted: str
) -> None:
    world = make_world()
    older, sets, checkpoint = world.start()
    newer, _, _ = world.start()
    with pytest.raises(ExceptionGroup) as caught:
        await asyncio.wait_for(train(older, sets, checkpoint=checkpoint), 30)
    assert isinstance(root_cause(caught.value), FencedError)
    await asyncio.wait_for(train(newer, sets, checkpoint=None), 30)
    assert world.digest == uninterrupted
    assert world.audit().findings == []


async def test_another_run_is_refused_before_it_fences_the_one_that_lives(
    make_world: MakeWorld,
) -> None:
    world = make_world()
    run, sets, checkpoint = world.start()
    phases = run.progress.resolved.spec.phases
    with pytest.raises(UserError, match=r"storage\.uri.*holds run run"):
        open_run(world.store, run_uid="other", phases=phases, added_tokens=(), holder="test")
    assert await train(run, sets, checkpoint=checkpoint)


async def test_a_resume_with_other_added_tokens_is_refused_by_the_field(
    make_world: MakeWorld,
) -> None:
    world = make_world()
    world.spec["model"]["addTokens"] = ["<a>", "<b>"]
    await world.crash(after=SFT_STEPS + 1)
    world.spec["model"]["addTokens"] = ["<b>", "<a>"]
    with pytest.raises(UserError, match=r"model\.addTokens.*saved with \['<a>', '<b>'\]"):
        world.start()
    world.spec["model"]["addTokens"] = ["<a>", "<b>"]
    assert await world.train()


async def test_a_stalled_controller_leaves_its_successors_checkpoint_alone(
    make_world: MakeWorld,
) -> None:
    world = make_world()
    stalled, _, _ = world.start()
    assert await world.train()
    stalled.progress.cursor.global_step = SFT_STEPS
    before = dict(world.store.objects)
    with pytest.raises(FencedError):
        await stalled.checkpoints.save_checkpoint("PhaseEnd")
    assert world.store.objects == before


async def test_a_controller_that_stalls_while_it_saves_touches_only_its_own_folder(
    make_world: MakeWorld,
) -> None:
    world = make_world()
    stalled, _, _ = world.start()
    await stalled.learners.copy_state("checkpoints/000000000004/000001/001/")
    await stalled.learners.save("checkpoints/000000000004/000001/001/")
    assert await world.train()
    await stalled.learners.save("checkpoints/000000000004/000001/001/")
    problems: list[str] = []
    for found in stored_checkpoints(world.store, run="run"):
        check_digests(world.store, found)
    newest = list_checkpoints(world.store)[::-1]
    assert first_intact(world.store, newest, run="run", problems=problems) is not None
    assert problems == []


@dataclass(slots=True)
class AwayLearners(SimulatedLearners):
    """Whose store is away for the first attempts to publish."""

    refusals: int = 2

    @override
    async def upload(self, version: VersionId) -> None:
        if self.refusals:
            self.refusals -= 1
            raise StoreError("the store did not answer")
        await SimulatedLearners.upload(self, version)


async def test_publishing_waits_for_a_store_that_is_away(
    make_world: MakeWorld, uninterrupted: str
) -> None:
    world = make_world()

    def prepare(run: Run) -> None:
        replace_learners(run, AwayLearners(world.store))

    assert await world.train(prepare)
    assert world.digest == uninterrupted


class NothingIsDeleted(MemoryStore):
    """Refuses deletions."""

    @override
    def delete(self, keys: Sequence[str]) -> None:
        raise StoreError("permission denied")


async def test_old_versions_that_cannot_be_deleted_fail_nothing(make_world: MakeWorld) -> None:
    world = make_world(NothingIsDeleted())

    def prepare(run: Run) -> None:
        assert isinstance(run.learners, SimulatedLearners)
        run.learners.publisher.is_full = True

    assert await world.train(prepare)
    run = world.runs[0]
    for key in [each for each in world.store.objects if each.startswith("checkpoints/")]:
        world.store.objects.pop(key)
    assert not await run.publishing.compaction.run_round()
    assert "permission denied" in run.publishing.compaction.last.failures[0].message


async def test_faults_of_a_step_leave_out_those_before_it(make_world: MakeWorld) -> None:
    world = make_world()

    def prepare(run: Run) -> None:
        run.progress.figures.retried = 7
        run.book.ledger.dropped["stale"] = 3

    assert await world.train(prepare)
    rows = [row for row in world.rows("step") if "retried" in row]
    assert {(row["retried"], row["dropped"]) for row in rows} == {(0, 0)}


async def test_a_rollout_of_an_evaluation_is_a_movement_that_others_see(
    make_world: MakeWorld,
) -> None:
    world = make_world()
    run, sets, _ = world.start()
    rl = run.progress.resolved.spec.phases[1]
    run.enter_phase(rl)
    run.progress.progress_s = 0.0
    assert await Evaluator(run=run, phase=rl, tasks=dict(sets.evaluations)).evaluate()
    assert run.progress.progress_s > 0.0
    run.reporter.update_status()
    assert run.reporter.status.rollouts.completed == 8


async def test_an_evaluation_that_was_added_is_measured(
    make_world: MakeWorld, tmp_path: Path
) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for file in ("task.toml", "instruction.md"):
            (tmp_path / name / file).touch()
    world = make_world()
    run, sets, _ = world.start()
    task_set = {"name": "new", "uri": f"file://{tmp_path}", "environment": "repos"}
    added = {"name": "added", "tasks": task_set, "phase": "rl"}
    missing = {**added, "name": "missing", "tasks": {**task_set, "uri": f"file://{tmp_path}/a/b"}}
    changed = RLRunSpec.model_validate({**world.spec, "evaluation": [missing, added]})
    order = run_pb2.ConfigureRun(spec_json=changed.model_dump_json(by_alias=True), generation=2)
    run.commands.accept(run_pb2.CommandRequest(command_id="1", configure=order))
    rl = run.progress.resolved.spec.phases[1]
    run.enter_phase(rl)
    async with asyncio.TaskGroup() as group:
        worker = group.create_task(run.publishing.run())
        await run.publishing.publish(is_served=True)
        assert await Evaluator(run=run, phase=rl, tasks=dict(sets.evaluations)).evaluate()
        worker.cancel()
    await run.reporter.recorder.finish()
    assert [(r["name"], r["count"]) for r in world.rows("eval")] == [("added", 2)]
    assert "EvaluationSkipped" in {r["reason"] for r in world.rows("event")}


async def test_the_rounding_of_published_weights_is_no_disagreement(make_world: MakeWorld) -> None:
    def prepare(run: Run) -> None:
        assert isinstance(run.learners, SimulatedLearners)
        run.learners.mismatch = 2e-2

    assert await make_world(weights={"dtype": "BFloat16"}).train(prepare)
