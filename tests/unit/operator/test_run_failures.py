"""What follows when something goes wrong in a run."""

from typing import Any

import pytest

from etude.operator.cluster.api import RefusedError
from etude.operator.cluster.memory import MemoryCluster
from etude.operator.manifests import Ref, labels
from etude.v1 import run_pb2


@pytest.fixture
async def running(lab: Any, run_body: Any) -> Any:
    lab.cluster.put(run_body())
    await lab.settle()
    await lab.say(state=run_pb2.RUN_STATE_RUNNING, step=1)
    return lab


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
    running.cluster.put(pod)  # by a controller that had not seen the new template yet
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
    lab.cluster.put(run_body())
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
    lab.cluster.put(run_body(deadlines={"stepProgressSeconds": 60}))
    await lab.settle()
    await lab.say(state=run_pb2.RUN_STATE_RUNNING, step=5)
    await lab.advance(50)
    await lab.say(state=run_pb2.RUN_STATE_RUNNING, step=6)
    await lab.advance(50)
    assert lab.run().status.attempt == 0
    await lab.advance(20)
    assert lab.run().status.attempt == 1
    assert [o.WhichOneof("what") for o in lab.peers.orders] == ["dump_stacks"]
    assert graces == {30}
    assert "NoProgress" in [e["reason"] for e in lab.cluster.events]


async def test_silence_before_ten_steps_is_judged_mildly(lab: Any, run_body: Any) -> None:
    lab.cluster.put(run_body())
    await lab.settle()
    await lab.say(state=run_pb2.RUN_STATE_RUNNING, step=5)
    await lab.advance(3_000)
    assert lab.run().status.attempt == 0
    await lab.advance(700)
    assert lab.run().status.attempt == 1


async def test_a_run_that_never_reports_fails_after_its_deadline(lab: Any, run_body: Any) -> None:
    lab.cluster.put(run_body(deadlines={"preRunningSeconds": 300}))
    await lab.settle()
    await lab.advance(299)
    assert lab.condition("Failed")[0] == "False"
    await lab.advance(2)
    assert lab.condition("Failed") == ("True", "DeadlineExceeded")


async def test_an_operator_that_was_just_started_fails_no_run_that_has_reported_before(
    lab: Any, run_body: Any
) -> None:
    lab.cluster.put(run_body(deadlines={"preRunningSeconds": 300}))
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
    lab.cluster.put(run_body(deadlines=limits))
    await lab.settle()
    await lab.say(state=run_pb2.RUN_STATE_RUNNING, step=5)
    await lab.advance(60)
    lab.cluster.put(run_body(deadlines=limits, suspend=True))
    await lab.settle()
    await lab.say(state=run_pb2.RUN_STATE_SUSPENDED, step=5)
    await lab.advance(1_000)
    lab.cluster.put(run_body(deadlines=limits))
    await lab.settle()
    await lab.advance(30)
    assert lab.condition("Failed")[0] == "False"
    await lab.advance(15)
    assert lab.condition("Failed") == ("True", "DeadlineExceeded")


async def test_a_controller_that_falls_silent_makes_the_run_unready(running: Any) -> None:
    assert running.condition("Ready")[0] == "True"
    running.book.disconnected(running.run().metadata.uid)
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


async def test_a_name_that_is_taken_is_reported_and_left_alone(lab: Any, run_body: Any) -> None:
    foreign = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "demo-run", "namespace": "lab"},
        "data": {"theirs": "yes"},
    }
    lab.cluster.put(foreign)
    lab.cluster.put(run_body())
    await lab.settle()
    assert lab.condition("Accepted") == ("False", "NameConflict")
    assert lab.run().status.phase == "Pending"
    kept = lab.cluster.objects()[Ref("ConfigMap", "lab", "demo-run")]
    assert kept["data"] == {"theirs": "yes"}
    lab.cluster.remove(Ref("ConfigMap", "lab", "demo-run"))
    await lab.advance(31)
    assert lab.condition("Accepted")[0] == "True"
    assert len(lab.names("Pod")) == 7


@pytest.mark.parametrize(
    ("spec", "reason", "words"),
    [
        ({"storage": {"uri": "file:///data"}}, "InvalidParameters", "spec.storage.uri"),
        ("algorithm", "InvalidParameters", "spec.phases[1].algorithm.parameters"),
        ("env", "InvalidParameters", "ETUDE_PORT is set by the operator"),
        ("home", "InvalidParameters", "spec.roles.rewards.env: HOME is set by the operator"),
        ("pool", "PoolNotFound", "spec.roles.environments[0].poolRef.name: no EnvPool shared"),
        ("template", "InvalidParameters", "spec.roles.environments[0].template: rust is none"),
        ("root", "InvalidParameters", "[0].poolTemplate.isolation.driver: Firecracker needs root"),
    ],
)
async def test_what_no_schema_can_judge_is_refused_with_the_field(
    lab: Any, run_body: Any, spec: Any, reason: str, words: str
) -> None:
    body = run_body(**spec) if isinstance(spec, dict) else run_body()
    roles = body["spec"]["roles"]
    match spec:
        case "algorithm":
            body["spec"]["phases"][1]["algorithm"] = {"name": "DrGRPO", "parameters": {"x": 1}}
        case "env":
            roles["trainer"] = {"env": [{"name": "ETUDE_PORT", "value": "1"}]}
        case "home":
            roles["rewards"]["env"] = [{"name": "HOME", "value": "/root"}]
        case "pool":
            roles["environments"][0].pop("poolTemplate")
            roles["environments"][0]["poolRef"] = {"name": "shared"}
        case "template":
            roles["environments"][0]["template"] = "rust"
        case "root":
            isolation = {"driver": "Firecracker"}
            roles["environments"][0]["poolTemplate"]["isolation"] = isolation
        case _:
            assert isinstance(spec, dict)
    lab.cluster.put(body)
    await lab.settle()
    assert lab.condition("Accepted") == ("False", reason)
    assert words in next(c.message for c in lab.run().status.conditions if c.type == "Accepted")
    assert lab.names("StatefulSet") == []
    lab.cluster.put(run_body())
    await lab.settle()
    assert lab.condition("Accepted")[0] == "True"


async def test_a_run_that_is_over_stays_so_when_its_spec_is_not_understood_for_a_while(
    running: Any, run_body: Any
) -> None:
    await running.say(state=run_pb2.RUN_STATE_FAILED, reason="Broken", message="for good")
    assert running.condition("Failed") == ("True", "Broken")
    key, spec = Ref("RLRun", "lab", "demo"), {"ofTheFuture": 1}
    running.cluster.put(run_body(**spec))
    await running.settle()
    said = running.cluster.objects()[key]["status"]
    facts = {each["type"]: each["status"] for each in said["conditions"]}
    assert (facts["Accepted"], facts["Failed"], said["phase"]) == ("False", "True", "Failed")
    running.cluster.put(run_body())
    await running.settle()
    assert running.condition("Failed") == ("True", "Broken")
    assert running.names("Pod") == []


async def test_an_object_that_an_older_schema_let_through_is_refused_by_name(
    lab: Any, run_body: Any
) -> None:
    body = run_body()
    body["spec"]["phases"][0]["surprise"] = True
    lab.cluster.put(body)
    await lab.settle()
    status = lab.cluster.objects()[Ref("RLRun", "lab", "demo")]["status"]
    accepted = status["conditions"][0]
    assert (accepted["status"], accepted["reason"]) == ("False", "InvalidSpec")
    assert "phases.0.surprise" in accepted["message"]


@pytest.fixture
def refusals(lab: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Names that the API server refuses to write, with how often; its words count along."""
    refused: dict[str, int] = {}
    apply = lab.cluster.apply

    async def picky(self: Any, manifest: Any, *, manager: str) -> Any:
        name = manifest["metadata"]["name"]
        if name in refused:
            refused[name] += 1
            raise RefusedError(f"{name}: exceeded quota, used: {refused[name]}")
        return await apply(manifest, manager=manager)

    monkeypatch.setattr(MemoryCluster, "apply", picky)
    return refused


async def test_a_refused_child_keeps_nothing_else_from_being_done(
    running: Any, run_body: Any, refusals: dict[str, int]
) -> None:
    refusals["demo-run"] = 0
    running.cluster.put(run_body(suspend=True))
    await running.settle()
    assert [o.WhichOneof("what") for o in running.peers.orders] == ["suspend"]
    await running.say(state=run_pb2.RUN_STATE_SUSPENDED, step=1)
    assert running.condition("Suspended") == ("True", "ByUser")
    assert running.condition("Accepted") == ("False", "Refused")
    assert running.names("Pod") == []


async def test_nothing_new_is_made_after_a_refusal_and_it_is_told_once(
    lab: Any, run_body: Any, refusals: dict[str, int]
) -> None:
    refusals["demo-run"] = 0
    lab.cluster.put(run_body())
    await lab.settle()
    assert lab.condition("Accepted") == ("False", "Refused")
    assert lab.names("StatefulSet") == []
    before = len(lab.writes)
    for _ in range(3):
        await lab.advance(31)
    assert lab.writes[before:] == []
    assert 3 <= refusals["demo-run"] <= 8
    refusals.clear()
    await lab.advance(31)
    assert lab.condition("Accepted")[0] == "True"


async def test_a_checkpoint_that_is_refused_is_registered_later(
    running: Any, refusals: dict[str, int]
) -> None:
    refusals["demo-s00000010-000000"] = 0
    await running.tell_checkpoint(10)
    assert running.names("Checkpoint") == []
    refusals.clear()
    await running.advance(31)
    assert running.names("Checkpoint") == ["demo-s00000010-000000"]


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
    lab.cluster.put(run_body(checkpointing={"timeoutSeconds": 900}))
    await lab.settle()
    await lab.say(state=run_pb2.RUN_STATE_LOADING, step=20, step_seconds_p99=5)
    await lab.say(state=state, step=20, step_seconds_p99=5)
    await lab.advance(patience_s - 5)
    assert lab.run().status.attempt == 0
    await lab.advance(10)
    assert lab.run().status.attempt == 1
