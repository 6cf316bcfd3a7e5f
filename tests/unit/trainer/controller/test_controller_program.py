"""The whole program of a run over simulated learners and rollouts: stop it anywhere, resume it."""

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from tests.support.trainer_simulation.workers import SimulatedLearners

from etude.common.blobs import MemoryStore
from etude.common.role_inputs import ResolvedRun
from etude.common.run_folder.record import StoreRecord
from etude.common.weights import VersionId, newest_version
from etude.trainer.controller.checkpoints.recovery import open_run
from etude.trainer.controller.run import Run
from etude.v1 import run_pb2

SFT_STEPS = 4
RL_STEPS = 6

MakeWorld = Callable[..., Any]


async def test_a_run_goes_through_its_phases_and_ends_with_a_final_checkpoint(
    make_world: MakeWorld,
) -> None:
    world = make_world()
    assert await world.train()
    run = world.runs[0]
    assert run.progress.cursor.global_step == SFT_STEPS + RL_STEPS
    manifests = sorted(k for k in world.store.objects if k.endswith("/manifest.json"))
    reasons = [json.loads(world.store.get(key))["reason"] for key in manifests]
    assert reasons == ["Scheduled", "PhaseEnd", "Scheduled", "Scheduled", "Final"]
    assert any("000000000010/model/config.json" in key for key in world.store.objects)
    found = world.audit(max_staleness=0)
    assert found.findings == []
    assert (found.accepted, found.trained) == (36, 36)
    assert newest_version(world.store) == VersionId(*(run.progress.cursor.policy or (0, 0)))


async def test_rows_tell_the_whole_story(make_world: MakeWorld) -> None:
    world = make_world()
    await world.train()
    steps = world.rows("step")
    assert [r["global_step"] for r in steps] == list(range(1, SFT_STEPS + RL_STEPS + 1))
    assert {"reward_mean", "staleness_max", "mismatch_mean", "tools"} <= steps[-1].keys()
    assert [r["step"] for r in world.rows("eval")] == [0, 3, 6]
    assert [r["count"] for r in world.rows("eval")] == [4, 2, 4]
    assert "greedy_success" in world.rows("eval")[0]
    assert "greedy_success" not in world.rows("eval")[1]
    written = list(StoreRecord(world.store).rollouts(SFT_STEPS + 1, "train"))
    assert len(written) == 6
    assert written[0]["turns"][-1]["role"] == "assistant"


@pytest.mark.parametrize("after", range(SFT_STEPS + RL_STEPS))
async def test_a_run_killed_after_any_step_resumes_to_the_same_weights(
    make_world: MakeWorld, uninterrupted: str, after: int
) -> None:
    world = make_world()
    await world.crash(after=after)
    assert await world.train()
    assert world.digest == uninterrupted
    found = world.audit(max_staleness=0)
    assert found.findings == []
    assert found.accepted == found.trained + found.dropped.total() + found.queued


async def test_a_run_killed_again_and_again_resumes_to_the_same_weights(
    make_world: MakeWorld, uninterrupted: str
) -> None:
    world = make_world()
    for after in (3, 2, 1, 0, 2, 1):
        await world.crash(after=after)
    assert await world.train()
    assert world.digest == uninterrupted
    assert world.audit(max_staleness=0).findings == []


async def test_with_every_checkpoint_lost_the_journal_alone_gives_the_same_weights(
    make_world: MakeWorld, uninterrupted: str
) -> None:
    world = make_world()
    await world.crash(after=SFT_STEPS + 4)
    for key in [k for k in world.store.objects if k.startswith("checkpoints/")]:
        del world.store.objects[key]
    assert await world.train()
    assert world.digest == uninterrupted
    assert world.audit(max_staleness=0).findings == []


async def test_a_corrupt_newest_checkpoint_falls_back_to_the_one_before(
    make_world: MakeWorld, uninterrupted: str
) -> None:
    world = make_world()
    await world.crash(after=SFT_STEPS + 5)
    damaged = max(k for k in world.store.objects if k.endswith("learner/state.json"))
    world.store.objects[damaged] = b"garbage"
    resolved = ResolvedRun.model_validate({"name": "d", "uid": "run", "spec": world.spec})
    opened = open_run(
        world.store, run_uid="run", phases=resolved.spec.phases, added_tokens=(), holder="t"
    )
    assert len(opened.problems) == 1
    assert damaged.rsplit("/", 2)[0] in opened.problems[0]
    assert await world.train()
    assert world.digest == uninterrupted


@pytest.mark.parametrize("staleness", [1, 2, 4])
async def test_asynchronous_runs_hold_their_bound_over_crashes(
    make_world: MakeWorld, staleness: int
) -> None:
    world = make_world(staleness=staleness)
    for after in (SFT_STEPS + 2, 2):
        await world.crash(after=after)
    assert await world.train()
    found = world.audit(max_staleness=staleness)
    assert found.findings == []
    assert found.trained == 36
    assert max(r["staleness_max"] for r in world.rows("step") if "staleness_max" in r) <= staleness


async def test_suspend_saves_and_resume_goes_on_to_the_same_weights(
    make_world: MakeWorld, uninterrupted: str
) -> None:
    world = make_world(every_steps=100)

    def prepare(run: Run) -> None:
        assert isinstance(run.learners, SimulatedLearners)
        learners = run.learners
        order = run_pb2.SuspendRun(checkpoint=True)
        request = run_pb2.CommandRequest(command_id="1", suspend=order)

        def suspend() -> None:
            if len(learners.trained) == SFT_STEPS + 2:
                run.commands.accept(request)
                run.commands.accept(request)

        learners.after_step = suspend

    assert not await world.train(prepare)
    steps = [int(k.split("/")[1]) for k in world.store.objects if k.endswith("/manifest.json")]
    assert max(steps) == world.runs[0].progress.cursor.global_step
    assert await world.train()
    assert world.runs[1].progress.cursor.global_step == SFT_STEPS + RL_STEPS
    assert world.digest == uninterrupted


async def test_configure_changes_the_cadence_and_echoes_the_generation(
    make_world: MakeWorld,
) -> None:
    world = make_world(every_steps=100)

    def prepare(run: Run) -> None:
        changed = json.dumps(make_world(every_steps=1).spec)
        order = run_pb2.ConfigureRun(spec_json=changed, generation=7)
        run.commands.accept(run_pb2.CommandRequest(command_id="c", configure=order))

    await world.train(prepare)
    assert world.runs[0].reporter.status.observed_generation == 7
    checkpoints = [
        r
        for r in world.runs[0].reporter.reports._happenings
        if r.WhichOneof("body") == "checkpoint"
    ]
    assert len(checkpoints) == SFT_STEPS + RL_STEPS


async def test_a_checkpoint_on_command_is_written_at_the_next_step(make_world: MakeWorld) -> None:
    world = make_world(every_steps=100)

    def prepare(run: Run) -> None:
        order = run_pb2.CommandRequest(command_id="1", checkpoint=run_pb2.CheckpointNow())
        run.commands.accept(order)

    await world.train(prepare)
    happenings = world.runs[0].reporter.reports._happenings
    steps = [r.checkpoint.step for r in happenings if r.WhichOneof("body") == "checkpoint"]
    assert steps == [1, SFT_STEPS, SFT_STEPS + RL_STEPS]


def keep_newest_checkpoint(store: MemoryStore) -> None:
    """As the operator does."""
    folders = sorted({key.split("/")[1] for key in store.objects if key.startswith("checkpoints/")})
    for folder in folders[:-1]:
        store.delete([key for key in store.objects if key.startswith(f"checkpoints/{folder}/")])


@pytest.mark.parametrize("is_full", [True, False])
async def test_old_versions_go_but_for_those_that_later_ones_or_checkpoints_need(
    make_world: MakeWorld, *, is_full: bool
) -> None:
    weights = {"dtype": "Float32", "advanced": {"retainVersions": 2, "chainRatio": "1000"}}
    world = make_world(weights=weights)

    def prepare(run: Run) -> None:
        assert isinstance(run.learners, SimulatedLearners)
        run.learners.publisher.is_full = is_full
        run.learners.after_step = lambda: keep_newest_checkpoint(world.store)

    await world.train(prepare)
    assert await world.runs[0].publishing.compaction.run_round()
    manifests = [k for k in world.store.objects if k.startswith("weights/manifests/")]
    checkpoints = [k for k in world.store.objects if k.endswith("/manifest.json")]
    named = {json.loads(world.store.get(k))["policy_version"] for k in checkpoints}
    numbers = {int(k.rsplit("/", 1)[1].removesuffix(".json")) for k in manifests}
    assert named <= numbers
    # A chain of deltas that no keyframe shortens is needed from its start.
    assert (len(numbers) < world.runs[0].publishing.next_version) == is_full


def test_the_controller_never_loads_torch() -> None:
    script = (
        "import sys, etude.trainer.controller.lifecycle\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'vllm')))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
