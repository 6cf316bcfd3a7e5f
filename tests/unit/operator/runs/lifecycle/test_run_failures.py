"""Default outcomes of failures in a run."""

from typing import Any

import pytest

from etude.operator.manifests import Ref, labels
from etude.v1 import run_pb2


async def fail_trainer(lab: Any, *, exit_code: int = 1, message: str = "") -> None:
    lab.new_controller()
    lab.end("demo-trainer-0", exit_code=exit_code, message=message)
    await lab.settle()
    await lab.say(state=run_pb2.RUN_STATE_RUNNING, step=1)


async def test_a_failed_trainer_starts_anew_alone(running: Any) -> None:
    before = {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in running.pods("inference")}
    await fail_trainer(running, exit_code=137, message="Killed")
    status = running.run().status
    assert [labels(pod)["etude.dev/attempt"] for pod in running.pods("trainer")] == ["1"]
    assert {
        p["metadata"]["name"]: p["metadata"]["uid"] for p in running.pods("inference")
    } == before
    assert (status.attempt, status.restarts.total, dict(status.restarts.by_role)) == (
        1,
        1,
        {"trainer": 1},
    )
    assert (status.last_failure.exit_code, status.last_failure.message) == (137, "Killed")
    assert status.intent is None
    assert status.phase == "Running"


async def test_the_same_failure_is_counted_once(running: Any) -> None:
    await fail_trainer(running)
    for _ in range(5):
        await running.advance(30)
    assert running.run().status.restarts.total == 1


async def test_a_pod_that_is_made_once_more_as_it_was_is_replaced_and_never_judged(
    running: Any,
) -> None:
    await fail_trainer(running)
    (pod,) = running.pods("trainer")
    old = {"etude.dev/attempt": "0"}
    pod = {**pod, "metadata": {**pod["metadata"], "labels": {**labels(pod), **old}}}
    running.cluster.upsert(pod)  # by a controller that had not seen the new template yet
    running.end("demo-trainer-0", exit_code=1)
    await running.settle()
    assert [labels(pod)["etude.dev/attempt"] for pod in running.pods("trainer")] == ["1"]
    assert running.run().status.restarts.total == 1


async def test_an_engine_is_restarted_in_place_until_that_was_tried_too_often(running: Any) -> None:
    running.end("demo-inference-0", exit_code=1, restarts=4)
    await running.settle()
    assert running.run().status.attempt == 0
    assert running.condition("RolesReady") == ("False", "CrashLooping")
    running.end("demo-inference-0", exit_code=1, restarts=5)
    await running.settle()
    assert dict(running.run().status.restarts.by_role) == {"inference": 1}
    assert {labels(pod)["etude.dev/attempt"] for pod in running.pods("inference")} == {"1"}


@pytest.mark.parametrize("role", ["trainer", "inference", "rewards"])
@pytest.mark.parametrize("exit_code", [64, 78])
async def test_a_role_that_refuses_its_configuration_fails_the_run(
    running: Any, role: str, exit_code: int
) -> None:
    running.end(f"demo-{role}-0", exit_code=exit_code, message="model.uri: no such folder")
    await running.settle()
    if role != "trainer":  # which works, and is asked to save what there is
        assert running.condition("Failed") == ("False", "NotFinished")
        await running.say(state=run_pb2.RUN_STATE_SUSPENDED, step=1)
    assert running.condition("Failed") == ("True", "InvalidSpec")
    message = next(c.message for c in running.run().status.conditions if c.type == "Failed")
    assert "model.uri: no such folder" in message
    assert running.names("Pod") == []


async def test_a_run_fails_once_its_restarts_are_used_up(running: Any) -> None:
    for _ in range(3):
        await fail_trainer(running)
        assert running.condition("Failed")[0] == "False"
    running.end("demo-trainer-0", exit_code=1, message="out of memory")
    await running.settle()
    assert running.condition("Failed") == ("True", "RestartsExhausted")
    assert running.run().status.restarts.total == 3


async def test_a_trainer_that_cannot_reach_its_store_is_started_again_until_it_can(
    running: Any,
) -> None:
    await running.say(state=run_pb2.RUN_STATE_RUNNING, step=1)
    running.new_controller()
    for restarts in range(1, 20):
        words = "StoreError: connection refused"
        running.end("demo-trainer-0", exit_code=75, message=words, restarts=restarts)
        await running.advance(300)
    assert (running.run().status.attempt, running.run().status.restarts.total) == (0, 0)
    assert running.condition("RolesReady") == ("False", "CrashLooping")
    running.end("demo-trainer-0", exit_code=1)
    await running.settle()
    assert running.run().status.restarts.counted == 1, "anything else counts as ever"


async def test_a_run_that_never_began_fails_if_its_store_cannot_be_reached(
    lab: Any, run_body: Any
) -> None:
    lab.cluster.upsert(run_body())
    await lab.settle()
    for _ in range(4):
        lab.end("demo-trainer-0", exit_code=75, message="StoreError: no such host")
        await lab.settle()
    assert lab.condition("Failed") == ("True", "RestartsExhausted")


async def test_clean_steps_make_earlier_restarts_forgotten(running: Any) -> None:
    await fail_trainer(running)
    assert running.run().status.restarts.counted == 1
    await running.say(state=run_pb2.RUN_STATE_RUNNING, step=51)
    await running.advance(5)
    assert running.run().status.restarts.counted == 0
    assert running.run().status.restarts.total == 1


async def test_a_disrupted_pod_is_no_failure(running: Any) -> None:
    key = Ref("Pod", "lab", "demo-trainer-0")
    ended = {"terminated": {"exitCode": 143, "reason": "Error"}}
    status = {
        "phase": "Failed",
        "conditions": [{"type": "DisruptionTarget", "status": "True"}],
        "containerStatuses": [{"name": "trainer", "restartCount": 0, "state": ended}],
    }
    running.cluster.set_status(key, status)
    await running.settle()
    await running.advance(30)
    assert running.run().status.restarts.total == 0


@pytest.mark.parametrize(
    ("waits_for", "reason"),
    [("ImagePullBackOff", "ImagePullFailed"), ("CrashLoopBackOff", "CrashLooping")],
)
async def test_what_keeps_the_keeper_of_certificates_from_starting_keeps_the_role(
    lab: Any, run_body: Any, waits_for: str, reason: str
) -> None:
    lab.cluster.upsert(run_body())
    await lab.settle()
    waiting = {"reason": waits_for, "message": "Back-off"}
    status = {
        "phase": "Pending",
        "conditions": [{"type": "Ready", "status": "False"}],
        "initContainerStatuses": [{"name": "certificates", "state": {"waiting": waiting}}],
        "containerStatuses": [
            {"name": "trainer", "state": {"waiting": {"reason": "PodInitializing"}}}
        ],
    }
    lab.cluster.set_status(Ref("Pod", "lab", "demo-trainer-0"), status)
    await lab.settle()
    assert lab.condition("RolesReady") == ("False", reason)


async def test_a_run_without_progress_dumps_its_stacks_and_restarts_its_trainer(
    lab: Any, run_body: Any
) -> None:
    graces: set[int] = set()

    def see(manifest: Any) -> None:
        metadata = manifest["metadata"]
        if "deletionGracePeriodSeconds" in metadata:
            graces.add(metadata["deletionGracePeriodSeconds"])

    lab.cluster.subscribe(see)
    lab.cluster.upsert(run_body(deadlines={"stepProgressSeconds": 60}))
    await lab.settle()
    await lab.say(state=run_pb2.RUN_STATE_RUNNING, step=5)
    await lab.advance(50)
    await lab.say(state=run_pb2.RUN_STATE_RUNNING, step=6)
    await lab.advance(50)
    assert lab.run().status.attempt == 0
    await lab.advance(20)
    assert lab.run().status.attempt == 1
    assert [o.WhichOneof("what") for o in lab.peers.commands] == ["dump_stacks"]
    assert graces == {30}
    assert "NoProgress" in [e["reason"] for e in lab.cluster.events]


async def test_silence_before_ten_steps_is_judged_mildly(lab: Any, run_body: Any) -> None:
    lab.cluster.upsert(run_body())
    await lab.settle()
    await lab.say(state=run_pb2.RUN_STATE_RUNNING, step=5)
    await lab.advance(3_000)
    assert lab.run().status.attempt == 0
    await lab.advance(700)
    assert lab.run().status.attempt == 1


@pytest.mark.parametrize("deadlines", [{}, {"stepProgressSeconds": 60}])
@pytest.mark.parametrize("state", [run_pb2.RUN_STATE_LOADING, run_pb2.RUN_STATE_RUNNING])
@pytest.mark.parametrize("step", [0, 500])
async def test_a_controller_has_an_hour_for_its_first_step_also_where_it_resumes(
    lab: Any, run_body: Any, deadlines: dict[str, int], state: Any, step: int
) -> None:
    lab.cluster.upsert(run_body(deadlines=deadlines))
    await lab.settle()
    await lab.say(state=state, step=step, step_seconds_p99=40, last_step_unix_ms=0)
    await lab.advance(3_590)
    assert lab.run().status.attempt == 0
    await lab.advance(20)
    assert lab.run().status.attempt == 1


async def test_a_run_that_waits_for_its_store_is_not_stalled_however_long_it_takes(
    lab: Any, run_body: Any
) -> None:
    lab.cluster.upsert(run_body(deadlines={"stepProgressSeconds": 60}))
    await lab.settle()
    await lab.say(state=run_pb2.RUN_STATE_RUNNING, step=20)
    await lab.advance(50)
    await lab.say(state=run_pb2.RUN_STATE_RUNNING, step=20, reason="StorageUnavailable")
    await lab.advance(7_200)
    assert lab.run().status.attempt == 0
    assert lab.condition("Stalled") == ("False", "Healthy")
    await lab.say(state=run_pb2.RUN_STATE_RUNNING, step=20)
    await lab.advance(50)
    assert lab.run().status.attempt == 0, "what the outage took does not count"
    await lab.advance(20)
    assert lab.run().status.attempt == 1


async def test_a_run_that_waits_for_a_window_says_so_and_is_neither_stalled_nor_degraded(
    lab: Any, run_body: Any
) -> None:
    lab.cluster.upsert(run_body(deadlines={"stepProgressSeconds": 60}))
    await lab.settle()
    message = "waiting for window 3 of s3://bucket/route"
    await lab.say(
        state=run_pb2.RUN_STATE_RUNNING, step=20, reason="WaitingForWindow", message=message
    )
    await lab.advance(7_200)
    assert lab.run().status.attempt == 0
    assert lab.condition("Stalled") == ("False", "Healthy")
    assert lab.condition("Degraded") == ("False", "Healthy")
    assert lab.condition("Progressing") == ("False", "WaitingForWindow")
    await lab.say(state=run_pb2.RUN_STATE_RUNNING, step=20)
    assert lab.condition("Progressing") == ("True", "StepsFinish")


async def test_a_run_that_fails_while_it_waits_for_its_store_still_saves_what_it_can(
    lab: Any, run_body: Any
) -> None:
    lab.cluster.upsert(run_body(deadlines={"activeSeconds": 100}))
    await lab.settle()
    await lab.say(state=run_pb2.RUN_STATE_RUNNING, step=20, reason="StorageUnavailable")
    await lab.advance(101)
    assert lab.run().status.intent.type == "Salvage"


async def test_a_run_that_never_reports_fails_after_its_deadline(lab: Any, run_body: Any) -> None:
    lab.cluster.upsert(run_body(deadlines={"preRunningSeconds": 300}))
    await lab.settle()
    await lab.advance(299)
    assert lab.condition("Failed")[0] == "False"
    await lab.advance(2)
    assert lab.condition("Failed") == ("True", "DeadlineExceeded")


async def test_an_operator_that_was_just_started_fails_no_run_that_has_reported_before(
    lab: Any, run_body: Any
) -> None:
    lab.cluster.upsert(run_body(deadlines={"preRunningSeconds": 300}))
    await lab.settle()
    await lab.say(state=run_pb2.RUN_STATE_RUNNING, step=5)
    await lab.advance(1_000)
    lab.new_controller()  # the new operator looks before it has heard anything
    await lab.kill()
    await lab.settle()
    assert lab.condition("Failed")[0] == "False"


async def test_time_with_pods_is_limited_and_time_without_is_not_counted(
    lab: Any, run_body: Any
) -> None:
    limits = {"activeSeconds": 100}
    lab.cluster.upsert(run_body(deadlines=limits))
    await lab.settle()
    await lab.say(state=run_pb2.RUN_STATE_RUNNING, step=5)
    await lab.advance(60)
    lab.cluster.upsert(run_body(deadlines=limits, suspend=True))
    await lab.settle()
    await lab.say(state=run_pb2.RUN_STATE_SUSPENDED, step=5)
    await lab.advance(1_000)
    lab.cluster.upsert(run_body(deadlines=limits))
    await lab.settle()
    await lab.advance(30)
    assert lab.condition("Failed")[0] == "False"
    await lab.advance(15)
    assert lab.condition("Failed") == ("True", "DeadlineExceeded")


async def test_a_controller_that_falls_silent_makes_the_run_unready(running: Any) -> None:
    assert running.condition("Ready")[0] == "True"
    running.book.record_disconnected(running.run().metadata.uid)
    running.dirty[Ref("RLRun", "lab", "demo")] = None
    await running.settle()
    assert running.condition("Ready")[0] == "True"
    await running.advance(31)
    assert running.condition("Ready") == ("False", "ControllerUnreachable")


async def test_trouble_that_the_controller_reports_shows_as_degraded(running: Any) -> None:
    message = "403 on weights/manifests"
    await running.say(
        state=run_pb2.RUN_STATE_RUNNING, step=2, reason="StorageUnavailable", message=message
    )
    assert running.condition("Degraded") == ("True", "StorageUnavailable")
    await running.say(state=run_pb2.RUN_STATE_RUNNING, step=3)
    assert running.condition("Degraded") == ("False", "Healthy")


@pytest.mark.parametrize(
    ("state", "patience_s"),
    [
        (run_pb2.RUN_STATE_RUNNING, 600),
        (run_pb2.RUN_STATE_CHECKPOINTING, 930),
        (run_pb2.RUN_STATE_EVALUATING, 3_600),
    ],
)
async def test_silence_is_judged_by_what_the_controller_is_at(
    lab: Any, run_body: Any, state: Any, patience_s: int
) -> None:
    lab.cluster.upsert(run_body(checkpointing={"timeoutSeconds": 900}))
    await lab.settle()
    await lab.say(state=run_pb2.RUN_STATE_LOADING, step=20, step_seconds_p99=5)
    await lab.say(state=state, step=20, step_seconds_p99=5)
    await lab.advance(patience_s - 5)
    assert lab.run().status.attempt == 0
    await lab.advance(10)
    assert lab.run().status.attempt == 1
