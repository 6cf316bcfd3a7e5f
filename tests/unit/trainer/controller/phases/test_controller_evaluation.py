"""Evaluations that are added to a run with a mistake in them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from etude.common.api.run.spec import RLRunSpec
from etude.common.blobs import Store
from etude.trainer.controller.phases import evaluation
from etude.trainer.controller.phases.evaluation import Evaluator
from etude.v1 import run_pb2

MakeWorld = Callable[..., Any]
SFT_STEPS = 4
"""Steps of the phase before the evaluated one."""


def _evaluator(world: Any, uri: str) -> Evaluator:
    """Of a run to which an evaluation was added."""
    run, sets, _ = world.start()
    task_set = {"name": "new", "uri": uri, "environment": "repos"}
    added = {"name": "added", "tasks": task_set, "phase": "rl", "everySteps": 2}
    changed = RLRunSpec.model_validate({**world.spec, "evaluation": [added]})
    order = run_pb2.ConfigureRun(spec_json=changed.model_dump_json(by_alias=True), generation=2)
    run.commands.accept(run_pb2.CommandRequest(command_id="1", configure=order))
    rl = run.progress.resolved.spec.phases[1]
    run.enter_phase(rl)
    return Evaluator(run=run, phase=rl, tasks=dict(sets.evaluations))


async def test_tasks_are_looked_up_when_due_and_a_mistake_is_told_once(
    make_world: MakeWorld, tmp_path: Path
) -> None:
    world = make_world()
    evaluator = _evaluator(world, f"file://{tmp_path}/typo")
    for evaluator.run.progress.cursor.step, told in ((1, 0), (2, 1), (4, 1)):
        assert await evaluator.evaluate()
        await evaluator.run.reporter.recorder.finish()
        reasons = [row["reason"] for row in world.rows("event")]
        assert reasons.count("EvaluationSkipped") == told
    assert not (tmp_path / "typo").exists()


async def test_a_task_set_that_the_machine_refuses_ends_no_run(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refused(store: Store, **_: object) -> None:
        raise PermissionError(13, "Permission denied", store.url)

    monkeypatch.setattr(evaluation, "find_tasks", refused)
    world = make_world()
    evaluator = _evaluator(world, f"file://{tmp_path}")
    assert await evaluator.evaluate()
    await evaluator.run.reporter.recorder.finish()
    assert "EvaluationSkipped" in {row["reason"] for row in world.rows("event")}


async def test_an_evaluation_whose_tasks_were_not_found_at_the_start_is_skipped(
    make_world: MakeWorld,
) -> None:
    world = make_world()
    run, _, _ = world.start()
    rl = run.progress.resolved.spec.phases[1]
    run.enter_phase(rl)
    assert await Evaluator(run=run, phase=rl, tasks={}).evaluate()
    await run.reporter.recorder.finish()
    assert "EvaluationSkipped" in {row["reason"] for row in world.rows("event")}


async def test_each_task_has_its_samples_in_the_sampled_pass_and_one_in_the_greedy_one(
    make_world: MakeWorld,
) -> None:
    world = make_world()
    (held_out,) = world.spec["evaluation"]
    world.spec["evaluation"] = [{**held_out, "samples": 3}]
    assert await world.train()
    record = world.runs[-1].reporter.recorder.record
    sampled, greedy = (
        list(record.rollouts(SFT_STEPS, split))
        for split in ("eval-held-out", "eval-held-out-greedy")
    )
    assert len({row["rollout_id"] for row in sampled}) == len(sampled) == 12
    assert len(greedy) == 4
    row = world.rows("eval")[0]
    assert row["success"] == pytest.approx(sum(each["success"] for each in sampled) / 12)
    assert set(row["best_of"]) == {"2"}
    assert row["best_of"]["2"] >= row["success"]
