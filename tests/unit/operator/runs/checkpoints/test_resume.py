"""Resume point of a run after a suspension, applied once."""

import json
from typing import Any

import pytest

from etude.common.api.kinds import Checkpoint, RLRun
from etude.operator.manifests import Ref
from etude.operator.runs.checkpoints import resume as checkpoints_resume
from etude.operator.runs.checkpoints.lineage import is_off_lineage
from etude.v1 import run_pb2

MAP = Ref("ConfigMap", "lab", "demo-run")


def record(step: int, reward: str, *, branch: int = 0, parent: int = 0) -> Any:
    return run_pb2.CheckpointRecord(
        step=step,
        reason="Scheduled",
        uri=f"s3://runs/demo/checkpoints/{step:012d}-{branch}",
        manifest_digest=digest(step, branch),
        size_bytes=10,
        metrics={"reward": reward},
        branch=branch,
        parent_digest=digest(parent, branch) if parent else "",
        parent_step=parent,
    )


def digest(step: int, branch: int = 0) -> str:
    return f"{step * 16 + branch:06x}".ljust(64, "0")


def name(step: int, branch: int = 0) -> str:
    return f"demo-s{step:08d}-{digest(step, branch)[:6]}"


async def with_history(lab: Any, body: dict[str, Any]) -> None:
    """A run whose best checkpoint is not its newest, suspended by its user."""
    lab.cluster.upsert(body)
    await lab.settle()
    await lab.say(state=run_pb2.RUN_STATE_RUNNING, step=1)
    parent = 0
    for step, reward in ((10, "0.2"), (20, "0.9"), (30, "0.4")):
        await lab.tell(record(step, reward, parent=parent))
        await lab.finish_jobs()
        parent = step
    await suspend(lab)


async def suspend(lab: Any) -> None:
    lab.cluster.upsert(changed(lab, suspend=True))
    await lab.settle()
    await lab.say(state=run_pb2.RUN_STATE_SUSPENDED, step=30)
    await lab.advance(60)
    assert lab.condition("Suspended") == ("True", "ByUser")
    lab.new_controller()


def changed(lab: Any, **spec: Any) -> dict[str, Any]:
    live = lab.cluster.objects()[Ref("RLRun", "lab", "demo")]
    metadata = {**live["metadata"], "generation": live["metadata"]["generation"] + 1}
    body: dict[str, Any] = {**live, "metadata": metadata, "spec": {**live["spec"], **spec}}
    return body


async def resume(lab: Any, **checkpointing: Any) -> None:
    lab.cluster.upsert(changed(lab, suspend=False, checkpointing=checkpointing))
    await lab.settle()


def told(lab: Any) -> dict[str, Any] | None:
    """Where the trainer is put back to."""
    found: dict[str, Any] | None = json.loads(lab.cluster.objects()[MAP]["data"]["run.json"]).get(
        "resume"
    )
    return found


BEST = {"keepBest": {"metric": "Reward"}, "resume": "Best"}


@pytest.mark.parametrize(
    ("checkpointing", "step"),
    [
        (BEST, 20),
        ({"resume": "Named", "resumeFrom": {"name": name(10)}}, 10),
        ({"resume": "None"}, None),
    ],
)
async def test_a_resumed_run_is_put_back_to_what_its_spec_says(
    lab: Any, run_body: Any, checkpointing: dict[str, Any], step: int | None
) -> None:
    await with_history(lab, run_body())
    assert told(lab) is None
    await resume(lab, **checkpointing)
    expected = {"number": 1, "branch": 0} | ({} if step is None else {"step": step})
    assert told(lab) == expected
    assert lab.pods("trainer")
    summary = lab.run().status.last_checkpoint
    assert (None if summary is None else summary.step) == step


async def test_the_newest_is_gone_on_from_unless_the_spec_says_otherwise(
    lab: Any, run_body: Any
) -> None:
    await with_history(lab, run_body())
    await resume(lab)
    assert told(lab) is None
    assert lab.run().status.resumption is None
    assert lab.run().status.last_checkpoint.step == 30


async def test_a_restart_of_the_trainer_puts_nothing_back_and_its_users_next_resume_does(
    lab: Any, run_body: Any
) -> None:
    await with_history(lab, run_body())
    await resume(lab, **BEST)
    await lab.say(state=run_pb2.RUN_STATE_RUNNING, step=21)
    before = told(lab)
    lab.end("demo-trainer-0", exit_code=1)
    await lab.settle()
    await lab.kill()
    await lab.settle()
    assert told(lab) == before
    await suspend(lab)
    await resume(lab, **BEST)
    assert told(lab) == {"number": 2, "step": 20, "branch": 0}


@pytest.mark.parametrize("reason", ["GateNotMet", "MonitorFroze"])
async def test_a_run_that_is_suspended_while_something_else_holds_it_is_put_back_anew(
    lab: Any, run_body: Any, reason: str
) -> None:
    await with_history(lab, run_body())
    await resume(lab, **BEST)
    await lab.say(state=run_pb2.RUN_STATE_RUNNING, step=21)
    await lab.say(state=run_pb2.RUN_STATE_RUNNING, step=21, reason=reason)
    await lab.say(state=run_pb2.RUN_STATE_SUSPENDED, step=21)
    await lab.advance(60)
    assert not lab.pods("trainer")
    assert lab.run().status.hold.reason == reason
    lab.cluster.upsert(changed(lab, suspend=True))
    await lab.settle()
    assert lab.condition("Suspended") == ("True", "ByUser")
    lab.new_controller()
    await resume(lab, **BEST)
    assert told(lab) == {"number": 2, "step": 20, "branch": 0}


async def test_what_a_run_left_is_no_place_to_resume_and_yields_to_what_is_newer(
    lab: Any, run_body: Any
) -> None:
    await with_history(lab, run_body())
    await resume(lab, resume="Named", resumeFrom={"name": name(10)}, keepLast=1)
    await lab.say(state=run_pb2.RUN_STATE_RUNNING, step=11)
    assert lab.run().status.last_checkpoint.step == 10
    await lab.tell(record(12, "0.3", branch=1, parent=0))
    await lab.finish_jobs()
    await lab.finish_jobs()
    assert lab.run().status.last_checkpoint.step == 12
    kept = {name(10), name(12, 1)}
    assert set(lab.names("Checkpoint")) == kept


async def test_what_a_run_left_is_left_after_it_is_put_back_once_more(
    lab: Any, run_body: Any
) -> None:
    """20 of the first branch is older than what it is put back to now, and was left before."""
    await with_history(lab, run_body())
    await resume(lab, resume="Named", resumeFrom={"name": name(10)}, keepLast=9)
    await lab.say(state=run_pb2.RUN_STATE_RUNNING, step=11)
    for step, parent in ((12, 10), (25, 12)):
        await lab.tell(record(step, "0.3", branch=1, parent=parent))
        await lab.finish_jobs()
        await lab.finish_jobs()
    await suspend(lab)
    await resume(lab, resume="Named", resumeFrom={"name": name(25, 1)}, keepLast=9)
    back = lab.run().status.resumption
    assert [(at.number, at.step, at.branch) for at in back.earlier] == [(1, 10, 0)]
    assert lab.run().status.last_checkpoint.name == name(25, 1)
    left = {n: is_off_lineage(c, back) for n, c in checkpoints(lab).items()}
    assert left == {
        name(10): False,
        name(20): True,
        name(30): True,
        name(12, 1): False,
        name(25, 1): False,
    }


def checkpoints(lab: Any) -> dict[str, Checkpoint]:
    return {
        key.name: Checkpoint.parse_known_fields(body)
        for key, body in lab.cluster.objects().items()
        if key.kind == "Checkpoint"
    }


async def test_a_run_that_is_resumed_before_its_pods_are_gone_is_put_back_when_they_come_again(
    lab: Any, run_body: Any
) -> None:
    await with_history(lab, run_body())
    await resume(lab)
    await lab.advance(10)
    named = {"resume": "Named", "resumeFrom": {"name": name(10)}}
    lab.cluster.upsert(changed(lab, suspend=True, checkpointing=named))
    await lab.settle()
    assert lab.run().status.phase == "Suspending"
    held_since = lab.run().status.active.since
    await resume(lab, **named)
    assert told(lab) is None, "its pods are still those of before"
    await lab.say(state=run_pb2.RUN_STATE_SUSPENDED, step=31)
    await lab.advance(60)
    assert told(lab) == {"number": 1, "step": 10, "branch": 0}
    assert lab.pods("trainer")
    active = lab.run().status.active
    assert active.since != held_since
    assert active.seconds > 0


async def test_a_checkpoint_that_is_not_ready_is_waited_for(lab: Any, run_body: Any) -> None:
    await with_history(lab, run_body())
    await resume(lab, resume="Named", resumeFrom={"name": "demo-s00000099-000000"})
    found = next(c for c in lab.run().status.conditions if c.type == "Accepted")
    assert (found.status, found.reason) == ("False", "CheckpointNotReady")
    assert "spec.checkpointing.resumeFrom.name" in found.message
    assert not lab.pods("trainer")
    await resume(lab, resume="Named", resumeFrom={"name": name(20)})
    assert lab.condition("Accepted")[0] == "True"
    assert told(lab) == {"number": 1, "step": 20, "branch": 0}


async def again_at_30(lab: Any, run_body: Any, **said: Any) -> None:
    """A run that was put back saves at a step that it had saved at before, and says what it is."""
    await with_history(lab, run_body())
    await resume(lab, resume="Named", resumeFrom={"name": name(20)})
    await lab.say(state=run_pb2.RUN_STATE_RUNNING, step=21)
    if said["state"] == run_pb2.RUN_STATE_SUSPENDED:
        lab.cluster.upsert(changed(lab, suspend=True))
        await lab.settle()
    await lab.tell(record(30, "0.5", branch=1, parent=20))
    await lab.say(step=30, **said)


async def test_pods_stay_until_the_step_of_this_branch_is_verified(lab: Any, run_body: Any) -> None:
    await again_at_30(lab, run_body, state=run_pb2.RUN_STATE_SUSPENDED)
    assert lab.run().status.phase == "Suspending"
    assert lab.pods("trainer"), "the new one is not read back yet"
    await lab.finish_jobs()
    await lab.advance(5)
    assert lab.run().status.phase == "Suspended"


async def test_a_run_with_a_damaged_final_is_not_complete_by_that_of_another_branch(
    lab: Any, run_body: Any
) -> None:
    await again_at_30(lab, run_body, state=run_pb2.RUN_STATE_DONE)
    assert lab.run().status.phase == "Running"
    for _ in range(3):
        await lab.finish_jobs(exit_code=65, message="does not match the manifest")
    assert lab.condition("Complete")[0] == "False"
    assert lab.run().status.restarts.by_role["trainer"], "its steps are repeated"


@pytest.mark.parametrize("found", ["Pending", "Corrupt", "absent"])
async def test_what_is_not_ready_stays_undecided_where_pods_are_still_there(
    lab: Any, run_body: Any, found: str
) -> None:
    """As when a queue suspends a JobSet: the run waits, and has pods for a moment longer."""
    await with_history(lab, run_body())
    named = {"resume": "Named", "resumeFrom": {"name": name(20)}}
    run = RLRun.parse_known_fields(changed(lab, suspend=False, checkpointing=named))
    saved = Checkpoint.parse_known_fields(lab.cluster.objects()[Ref("Checkpoint", "lab", name(20))])
    decision = checkpoints_resume.decide_resumption(run, [saved])
    assert decision is not None
    assert decision.name == name(20)
    conditions = [
        c.model_copy(update={"status": "False", "reason": found}) for c in ready_of(saved)
    ]
    saved = saved.model_copy(
        update={"status": saved.status.model_copy(update={"conditions": conditions})}
    )
    checkpoints = [] if found == "absent" else [saved]
    assert checkpoints_resume.decide_resumption(run, checkpoints) == run.status.resumption
    assert checkpoints_resume.resume_problem(run, checkpoints)


def ready_of(checkpoint: Checkpoint) -> list[Any]:
    return [c for c in checkpoint.status.conditions if c.type == "Ready"]


async def test_best_is_the_newest_while_nothing_has_its_figure(lab: Any, run_body: Any) -> None:
    await with_history(lab, run_body())
    evaluation = {"metric": "EvalSuccess"}
    held_out = {"name": "held-out", "uri": "s3://b/h", "environment": "repos"}
    body = changed(lab, evaluation=[{"name": "held-out", "phase": "rl", "tasks": held_out}])
    lab.cluster.upsert(body)
    await resume(lab, resume="Best", keepBest=evaluation)
    assert told(lab) is None
    assert lab.pods("trainer")


async def test_a_checkpoint_names_the_one_that_it_goes_back_to(lab: Any, run_body: Any) -> None:
    await with_history(lab, run_body())
    objects = lab.cluster.objects()
    parents = [
        objects[Ref("Checkpoint", "lab", name(step))]["spec"].get("parentRef")
        for step in (10, 20, 30)
    ]
    assert parents == [None, {"name": name(10)}, {"name": name(20)}]


async def test_the_parent_of_a_checkpoint_may_be_one_that_somebody_asked_for(
    lab: Any, run_body: Any
) -> None:
    lab.cluster.upsert(run_body())
    await lab.settle()
    await lab.say(state=run_pb2.RUN_STATE_RUNNING, step=1)
    asked = {
        "apiVersion": "etude.dev/v1alpha1",
        "kind": "Checkpoint",
        "metadata": {"name": "mine", "namespace": "lab", "uid": "uid-mine"},
        "spec": {"runRef": {"name": "demo"}, "reason": "Manual"},
    }
    lab.cluster.upsert(asked)
    await lab.settle()
    first = record(10, "0.2")
    first.request = "uid-mine"
    await lab.tell(first)
    await lab.tell(record(20, "0.2", parent=10))
    spec = lab.cluster.objects()[Ref("Checkpoint", "lab", name(20))]["spec"]
    assert spec["parentRef"] == {"name": "mine"}


async def test_the_best_checkpoint_is_shown_with_its_figure(lab: Any, run_body: Any) -> None:
    await with_history(lab, run_body(checkpointing={"keepBest": {"metric": "Reward"}}))
    best = lab.run().status.best_checkpoint
    assert best is not None
    assert (best.name, best.step, best.metric) == (name(20), 20, "0.9")
    lab.cluster.upsert(changed(lab, checkpointing={}))
    await lab.settle()
    await lab.advance(5)
    assert lab.run().status.best_checkpoint is None


async def test_a_role_says_how_many_gpus_it_asks_for(lab: Any, run_body: Any) -> None:
    lab.cluster.upsert(run_body())
    await lab.settle()
    assert {r.name: r.gpus for r in lab.run().status.roles} == {
        "trainer": 0,
        "inference": 2,
        "rewards": 0,
    }
