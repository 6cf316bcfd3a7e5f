"""A run from its creation to its end, over a cluster in memory."""

from typing import Any

import pytest

from etude.operator.manifests import Ref
from etude.v1 import run_pb2


async def started(lab: Any, run_body: Any, **spec: Any) -> None:
    """A run whose controller reports steps."""
    lab.cluster.upsert(run_body(**spec))
    await lab.settle()
    await lab.say(state=run_pb2.RUN_STATE_RUNNING, step=1, productive_seconds=10)


async def test_a_run_gets_its_children_and_says_so(lab: Any, run_body: Any) -> None:
    lab.cluster.upsert(run_body())
    await lab.settle()
    assert lab.names("StatefulSet") == [
        "demo-inference",
        "demo-repos-broker",
        "demo-rewards",
        "demo-trainer",
    ]
    assert lab.names("Pod") == [
        "demo-inference-0",
        "demo-inference-1",
        "demo-repos-broker-0",
        "demo-repos-node-0",
        "demo-repos-node-1",
        "demo-rewards-0",
        "demo-trainer-0",
    ]
    assert lab.condition("Accepted") == ("True", "Accepted")
    assert lab.condition("RolesReady") == ("True", "PodsReady")
    assert lab.condition("EnvironmentsReady") == ("True", "PoolsAvailable")
    assert lab.condition("Ready") == ("False", "ControllerUnreachable")
    assert lab.run().status.phase == "Initializing"


async def test_a_reporting_run_is_running_and_shows_its_figures(lab: Any, run_body: Any) -> None:
    await started(lab, run_body)
    await lab.advance(10)
    await lab.say(
        state=run_pb2.RUN_STATE_RUNNING,
        step=12,
        policy_version=13,
        reward_mean=0.5,
        reward_ewma=0.4,
        staleness_max=1,
        rollouts=run_pb2.RolloutCounts(completed=128, trained=128),
        eval_success=0.38,
        last_step_unix_ms=int(lab.clock.wall_s() * 1000),
        productive_seconds=5,
    )
    await lab.advance(10)
    status = lab.run().status
    assert lab.condition("Ready") == ("True", "ControllerConnected")
    assert lab.condition("Progressing") == ("True", "StepsFinish")
    assert (status.phase, status.active_phase) == ("Running", "rl")
    assert status.step.text == "12/40"
    assert (status.policy_version, status.reward.ewma, status.staleness.max) == (13, "0.4", 1)
    assert status.eval_success == "0.38"
    assert status.ettr == "0.500"


async def test_a_steady_run_costs_no_write(lab: Any, run_body: Any) -> None:
    await started(lab, run_body)
    await lab.advance(10)
    before = len(lab.writes)
    for _ in range(12):
        lab.dirty |= dict.fromkeys(k for k in lab.cluster.objects() if k.kind in lab_kinds())
        await lab.advance(5)
    assert lab.writes[before:] == []


async def test_a_restarted_operator_writes_nothing(lab: Any, run_body: Any) -> None:
    await started(lab, run_body)
    await lab.say(state=run_pb2.RUN_STATE_RUNNING, step=1, productive_seconds=10)
    await lab.advance(10)
    await lab.kill()
    before = len(lab.writes)
    await lab.say(state=run_pb2.RUN_STATE_RUNNING, step=1, productive_seconds=10)
    assert [w for w in lab.writes[before:] if not w.startswith("status")] == []


async def test_moving_figures_are_written_every_five_seconds_and_conditions_at_once(
    lab: Any, run_body: Any
) -> None:
    await started(lab, run_body)
    await lab.advance(10)
    before = len(lab.writes)
    for step in range(2, 12):
        await lab.say(state=run_pb2.RUN_STATE_RUNNING, step=step)
        await lab.advance(1)
    assert 1 <= len(lab.writes) - before <= 3
    before = len(lab.writes)
    await lab.say(state=run_pb2.RUN_STATE_EVALUATING, step=12)
    assert lab.writes[before:] == ["status RLRun/demo"]
    assert lab.run().status.phase == "Evaluating"


async def test_a_supervised_phase_does_not_wait_for_engines(lab: Any, run_body: Any) -> None:
    lab.cluster.upsert(run_body())
    await lab.settle()
    for name in ("demo-inference-0", "demo-inference-1"):
        lab.cluster.set_status(Ref("Pod", "lab", name), {"phase": "Running"})
    await lab.say(state=run_pb2.RUN_STATE_RUNNING, phase="sft", step=1)
    assert lab.run().status.phase == "Running"
    await lab.say(state=run_pb2.RUN_STATE_RUNNING, phase="rl", step=1)
    assert lab.run().status.phase == "Provisioning"
    assert lab.condition("Progressing") == ("False", "WaitingForRoles")


async def test_a_finished_run_releases_its_pods_and_is_complete_for_ever(
    lab: Any, run_body: Any
) -> None:
    await started(lab, run_body)
    await lab.tell_checkpoint(40)
    await lab.finish_jobs()
    await lab.say(state=run_pb2.RUN_STATE_DONE, step=40)
    assert lab.condition("Complete") == ("True", "AllPhasesDone")
    assert lab.condition("Failed")[0] == "False"
    assert lab.run().status.phase == "Succeeded"
    assert lab.names("Pod") == []
    completed = lab.run().status.completion_time
    body = run_body()
    body["spec"]["suspend"] = True
    lab.cluster.upsert(body)
    await lab.advance(600)
    assert lab.condition("Complete") == ("True", "AllPhasesDone")
    assert lab.run().status.completion_time == completed


async def test_a_run_is_complete_once_its_final_checkpoint_was_read_back(
    lab: Any, run_body: Any
) -> None:
    await started(lab, run_body)
    await lab.tell_checkpoint(40)
    await lab.say(state=run_pb2.RUN_STATE_DONE, step=40)
    await lab.advance(500)
    assert lab.condition("Complete")[0] == "False"
    assert lab.pods("trainer")
    await lab.finish_jobs()
    assert lab.condition("Complete") == ("True", "AllPhasesDone")


async def test_a_store_that_stays_away_does_not_hold_up_the_end_for_ever(
    lab: Any, run_body: Any
) -> None:
    await started(lab, run_body)
    await lab.tell_checkpoint(40)
    await lab.say(state=run_pb2.RUN_STATE_DONE, step=40)
    for _ in range(3):
        await lab.finish_jobs(exit_code=75, message="connection refused")
    await lab.advance(601)
    assert lab.condition("Complete") == ("True", "AllPhasesDone")
    assert lab.condition("CheckpointHealthy") == ("False", "StorageUnavailable")


async def test_steps_behind_a_damaged_final_checkpoint_are_repeated(
    lab: Any, run_body: Any
) -> None:
    await started(lab, run_body)
    await lab.tell_checkpoint(40)
    await lab.say(state=run_pb2.RUN_STATE_DONE, step=40)
    lab.new_controller()
    for _ in range(3):
        await lab.finish_jobs(exit_code=65, message="learner/0: is missing")
    assert (lab.run().status.attempt, lab.condition("Complete")[0]) == (1, "False")
    await lab.tell_event("Resumed")
    assert lab.run().status.attempt == 1
    await lab.say(state=run_pb2.RUN_STATE_RUNNING, step=30)
    digest = "f" * 64
    record = run_pb2.CheckpointRecord(
        step=40, reason="Final", uri="s3://runs/demo/again", manifest_digest=digest
    )
    await lab.tell(record)
    await lab.say(state=run_pb2.RUN_STATE_DONE, step=40)
    assert (lab.run().status.attempt, lab.condition("Complete")[0]) == (1, "False")
    await lab.finish_jobs()
    assert lab.run().status.attempt == 1
    assert lab.condition("Complete") == ("True", "AllPhasesDone")
    assert lab.condition("CheckpointHealthy") == ("True", "CheckpointVerified")


async def test_a_run_that_the_controller_gives_up_fails_with_its_reason(
    lab: Any, run_body: Any
) -> None:
    await started(lab, run_body)
    message = "log-probabilities differ by 0.3"
    await lab.say(state=run_pb2.RUN_STATE_FAILED, reason="WeightMismatch", message=message)
    assert lab.condition("Failed") == ("True", "WeightMismatch")
    assert lab.run().status.last_failure.message == message
    assert lab.names("Pod") == []
    assert [e["reason"] for e in lab.cluster.events if e["type"] == "Warning"] == ["WeightMismatch"]


async def test_suspending_waits_for_the_checkpoint_and_then_releases_the_pods(
    lab: Any, run_body: Any
) -> None:
    await started(lab, run_body)
    lab.cluster.upsert(run_body(suspend=True))
    await lab.settle()
    assert lab.run().status.phase == "Suspending"
    assert [o.WhichOneof("what") for o in lab.peers.commands] == ["suspend"]
    assert lab.pods("trainer")
    await lab.tell_checkpoint(7)
    await lab.say(state=run_pb2.RUN_STATE_SUSPENDED, step=7)
    assert lab.condition("Suspended") == ("False", "Suspending")
    await lab.finish_jobs()
    assert lab.condition("Suspended") == ("True", "ByUser")
    assert lab.names("Pod") == []
    assert lab.run().status.last_checkpoint.step == 7
    assert lab.run().status.intent is None


async def test_a_resumed_run_gets_its_pods_back(lab: Any, run_body: Any) -> None:
    await started(lab, run_body)
    lab.cluster.upsert(run_body(suspend=True))
    await lab.settle()
    await lab.say(state=run_pb2.RUN_STATE_SUSPENDED, step=7)
    assert lab.condition("Suspended")[0] == "True"
    held = lab.run().status.active.seconds
    await lab.advance(100)
    lab.cluster.upsert(run_body(suspend=False))
    await lab.settle()
    await lab.say(state=run_pb2.RUN_STATE_RUNNING, step=7)
    assert lab.condition("Suspended") == ("False", "NotSuspended")
    assert lab.run().status.phase == "Running"
    assert lab.run().status.active.seconds == held
    assert len(lab.names("Pod")) == 7


@pytest.mark.parametrize("epoch", [1, 5])
@pytest.mark.parametrize("is_restarted", [False, True])
async def test_a_run_that_resumes_in_another_store_is_heard_from_its_start(
    lab: Any, run_body: Any, epoch: int, *, is_restarted: bool
) -> None:
    lab.epoch = epoch
    await started(lab, run_body)
    await lab.tell_checkpoint(5)
    lab.cluster.upsert(run_body(suspend=True))
    await lab.settle()
    await lab.tell_checkpoint(7)
    await lab.say(state=run_pb2.RUN_STATE_SUSPENDED, step=7)
    await lab.finish_jobs()
    assert lab.condition("Suspended")[0] == "True"
    lab.new_controller()
    lab.epoch = 1
    if is_restarted:
        await lab.kill()
    storage = {"uri": "s3://elsewhere/demo", "secretRef": {"name": "s3"}}
    lab.cluster.upsert(run_body(storage=storage, suspend=True))
    await lab.settle()
    lab.cluster.upsert(run_body(storage=storage))
    await lab.settle()
    await lab.tell_checkpoint(40)
    assert "demo-s00000040-000000" in lab.names("Checkpoint")
    assert lab.condition("Suspended")[0] == "False"
    await lab.say(state=run_pb2.RUN_STATE_DONE, step=40)
    await lab.finish_jobs()
    assert lab.condition("Complete") == ("True", "AllPhasesDone")


async def test_a_suspension_after_a_fall_back_waits_for_what_was_saved_last(
    lab: Any, run_body: Any
) -> None:
    await started(lab, run_body)
    await lab.tell_checkpoint(20)
    for _ in range(3):
        await lab.finish_jobs(exit_code=65, message="learner/0: is missing")
    await lab.advance(10)
    lab.cluster.upsert(run_body(suspend=True))
    await lab.settle()
    await lab.tell_checkpoint(15)
    await lab.say(state=run_pb2.RUN_STATE_SUSPENDED, step=15)
    assert lab.condition("Suspended") == ("False", "Suspending")
    await lab.finish_jobs()
    assert lab.condition("Suspended") == ("True", "ByUser")


async def test_a_suspension_without_an_answer_uses_the_last_checkpoint(
    lab: Any, run_body: Any
) -> None:
    await started(lab, run_body, checkpointing={"timeoutSeconds": 60})
    lab.cluster.upsert(run_body(suspend=True, checkpointing={"timeoutSeconds": 60}))
    await lab.settle()
    assert lab.run().status.phase == "Suspending"
    await lab.advance(61)
    assert lab.condition("Suspended") == ("True", "ByUser")
    assert "SuspendTimeout" in [e["reason"] for e in lab.cluster.events]


async def test_a_suspension_that_may_skip_the_checkpoint_does_not_wait(
    lab: Any, run_body: Any
) -> None:
    await started(lab, run_body, checkpointing={"onSuspend": "Skip"})
    lab.cluster.upsert(run_body(suspend=True, checkpointing={"onSuspend": "Skip"}))
    await lab.settle()
    assert lab.condition("Suspended") == ("True", "ByUser")
    assert lab.peers.commands == []


async def test_a_run_that_is_created_suspended_makes_nothing(lab: Any, run_body: Any) -> None:
    lab.cluster.upsert(run_body(suspend=True))
    await lab.settle()
    assert lab.names("StatefulSet") == []
    assert lab.condition("Suspended") == ("True", "ByUser")
    lab.cluster.upsert(run_body())
    await lab.settle()
    assert len(lab.names("Pod")) == 7


async def test_a_changed_spec_reaches_the_controller_once(lab: Any, run_body: Any) -> None:
    await started(lab, run_body)
    lab.cluster.upsert(run_body(checkpointing={"everySteps": 3}))
    await lab.settle()
    await lab.say(state=run_pb2.RUN_STATE_RUNNING, step=2, observed_generation=1)
    await lab.say(state=run_pb2.RUN_STATE_RUNNING, step=3, observed_generation=1)
    sent = [o.configure for o in lab.peers.commands if o.HasField("configure")]
    assert [order.generation for order in sent] == [2]
    assert '"everySteps":3' in sent[0].spec_json


async def test_deleting_a_run_leaves_no_owned_object(lab: Any, run_body: Any) -> None:
    await started(lab, run_body)
    lab.cluster.remove(Ref("RLRun", "lab", "demo"))
    await lab.settle()
    assert lab.cluster.objects() == {}


async def test_a_whole_life_costs_few_writes(lab: Any, run_body: Any) -> None:
    await started(lab, run_body)
    for step in range(2, 41):
        await lab.advance(4)
        await lab.say(state=run_pb2.RUN_STATE_RUNNING, step=step)
    await lab.say(state=run_pb2.RUN_STATE_DONE, step=40)
    progress = sum(w == "status RLRun/demo" for w in lab.writes)
    assert len(lab.writes) - progress + len(lab.cluster.events) <= 60


def lab_kinds() -> tuple[str, ...]:
    return ("RLRun", "EnvPool", "Checkpoint")


async def test_what_leaves_the_spec_is_deleted_and_holds_nothing_up(
    lab: Any, run_body: Any
) -> None:
    await started(lab, run_body)
    theirs = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": "notes",
            "namespace": "lab",
            "ownerReferences": [
                {"kind": "RLRun", "uid": lab.run().metadata.uid, "controller": True}
            ],
        },
    }
    lab.cluster.upsert(theirs)
    body = run_body()
    role = body["spec"]["roles"]["environments"][0]
    role["name"] = "sandboxes"
    body["spec"]["phases"][1]["tasks"][0]["environment"] = "sandboxes"
    lab.cluster.upsert(body)
    await lab.settle()
    assert lab.names("EnvPool") == ["demo-sandboxes"]
    assert not [name for name in lab.names("Pod") if "repos" in name]
    assert "notes" in lab.names("ConfigMap")
    await lab.say(state=run_pb2.RUN_STATE_DONE, step=40)
    assert lab.condition("Complete") == ("True", "AllPhasesDone")
