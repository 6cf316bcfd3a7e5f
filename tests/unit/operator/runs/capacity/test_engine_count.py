"""Engine count that follows the step time."""

from typing import Any

import pytest

from etude.operator.manifests import Ref
from etude.v1 import run_pb2

SET = Ref("StatefulSet", "lab", "demo-inference")
BUDGET = Ref("PodDisruptionBudget", "lab", "demo-inference")
SLOW: dict[str, Any] = {"step_tokens": 480_000.0, "wait_seconds": 120.0, "work_seconds": 20.0}
FAST: dict[str, Any] = {"step_tokens": 480_000.0, "wait_seconds": 10.0, "work_seconds": 20.0}


@pytest.fixture
async def running(lab: Any, run_body: Any) -> Any:
    body = run_body()
    body["spec"]["roles"]["inference"] = {
        "replicas": 2,
        "minReplicas": 1,
        "maxReplicas": 8,
        "autoscaling": {"mode": "StepTime", "targetStepSeconds": 60},
    }
    lab.cluster.upsert(body)
    await lab.settle()
    await say(lab, 0, engines=2)
    return lab


async def say(lab: Any, version: int, *, engines: int, limit: int = 0, **figures: float) -> None:
    await lab.say(
        state=run_pb2.RUN_STATE_RUNNING,
        step=version,
        policy_version=version,
        engines=engines,
        engine_limit=limit or engines,
        **figures,
    )
    await lab.advance(5)


def pods(lab: Any) -> int:
    return int(lab.cluster.objects()[SET]["spec"]["replicas"])


def told(lab: Any) -> list[int]:
    return [r.scale_engines.replicas for r in lab.peers.commands if r.HasField("scale_engines")]


async def test_engines_are_added_once_the_figures_of_some_versions_ask_for_them(
    running: Any,
) -> None:
    await say(running, 4, engines=2, **SLOW)
    assert (pods(running), told(running)) == (2, [])
    await say(running, 5, engines=2, **SLOW)
    assert (pods(running), told(running)) == (4, [4])
    decided = running.run().status.engines
    assert (decided.replicas, decided.version) == (4, 5)
    assert "a step waits 120.0 s for 480000 tokens" in decided.message
    assert running.cluster.objects()[BUDGET]["spec"]["minAvailable"] == 3


async def test_a_number_is_judged_only_while_the_controller_uses_it(running: Any) -> None:
    await say(running, 5, engines=2, **SLOW)
    for version in (10, 20, 30):  # two of four still load
        await say(running, version, engines=2, limit=4, **SLOW)
    assert pods(running) == 4
    await say(running, 34, engines=4, **SLOW)
    assert pods(running) == 4, "some of the figures are of the time with two"
    await say(running, 35, engines=4, **SLOW)
    assert pods(running) == 8


async def test_versions_without_an_engine_that_was_lost_say_nothing_of_the_number(
    running: Any,
) -> None:
    await say(running, 4, engines=1, **SLOW)
    for version in range(5, 9):
        await say(running, version, engines=2, **SLOW)
    assert pods(running) == 2
    await say(running, 9, engines=2, **SLOW)
    assert pods(running) == 4


async def test_figures_go_on_while_an_engine_is_missing(running: Any) -> None:
    """Each version moves that from which the number is judged later."""
    for version in range(1, 13):
        await running.say(
            state=run_pb2.RUN_STATE_RUNNING, step=version, policy_version=version, engines=1
        )
        await running.advance(1)
    status = running.run().status
    assert status.engines.version == 12
    assert status.step.current == 12


async def test_between_two_versions_nothing_changes(running: Any) -> None:
    for _ in range(10):
        await say(running, 3, engines=2, **SLOW)
    assert (pods(running), told(running)) == (2, [])


async def test_engines_go_only_once_the_controller_does_without_them(running: Any) -> None:
    await say(running, 5, engines=2, **FAST)
    assert (pods(running), told(running)) == (2, [1])
    assert running.run().status.engines.replicas == 1
    await running.kill()
    await running.settle()
    assert pods(running) == 2
    await say(running, 6, engines=1, **FAST)
    assert pods(running) == 1


async def test_a_new_controller_is_told_of_the_number(running: Any) -> None:
    await say(running, 5, engines=2, **SLOW)
    await say(running, 6, engines=4)
    running.new_controller()
    running.end("demo-trainer-0", exit_code=137)
    await running.settle()
    before = len(told(running))
    await say(running, 6, engines=2)
    await running.advance(10)  # the same order is not handed over twice at once
    await say(running, 6, engines=2)
    assert set(told(running)[before:]) == {4}
    assert pods(running) == 4


async def test_the_number_outlives_a_suspension(running: Any, run_body: Any) -> None:
    await say(running, 5, engines=2, **SLOW)
    body = run_body(suspend=True)
    body["spec"]["roles"] = running.cluster.objects()[Ref("RLRun", "lab", "demo")]["spec"]["roles"]
    running.cluster.upsert(body)
    await running.settle()
    await running.say(state=run_pb2.RUN_STATE_SUSPENDED, step=6)
    assert pods(running) == 0
    running.new_controller()
    running.cluster.upsert({**body, "spec": {**body["spec"], "suspend": False}})
    await running.settle()
    assert pods(running) == 4


async def test_the_trainer_knows_every_engine_that_may_come(running: Any) -> None:
    trainer = running.cluster.objects()[Ref("StatefulSet", "lab", "demo-trainer")]
    (container,) = trainer["spec"]["template"]["spec"]["containers"]
    given = {each["name"]: each.get("value") for each in container["env"]}
    assert len(given["ETUDE_INFERENCE_TARGETS"].split(",")) == 8


async def test_a_run_progresses_while_engines_beyond_the_least_are_loading(running: Any) -> None:
    await say(running, 5, engines=2, **SLOW)
    for ordinal in (2, 3):
        key = Ref("Pod", "lab", f"demo-inference-{ordinal}")
        not_yet = {"phase": "Running", "conditions": [{"type": "Ready", "status": "False"}]}
        running.cluster.set_status(key, not_yet)
    await running.settle()
    assert running.condition("RolesReady") == ("True", "PodsReady")
    assert running.run().status.phase == "Running"


async def test_fixed_engines_stay_as_they_are(lab: Any, run_body: Any) -> None:
    lab.cluster.upsert(run_body())
    await lab.settle()
    await say(lab, 50, engines=2, **SLOW)
    assert (pods(lab), told(lab)) == (2, [])
    assert lab.run().status.engines is None
