"""Disrupted pods, and terminating pods that still start."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.common.api.run.status import Restarts
from etude.operator.manifests import Manifest, Ref
from etude.operator.runs.capacity import disruptions
from etude.operator.runs.capacity.disruptions import STARTING_GRACE_S
from etude.v1 import run_pb2

POD = Ref("Pod", "lab", "demo-trainer-0")
GOING = [
    {"type": "Ready", "status": "True"},
    {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"},
]


@pytest.fixture
async def running(lab: Any, run_body: Any) -> Any:
    lab.cluster.upsert(run_body(failurePolicy={"maxRestarts": 0}))
    await lab.settle()
    await lab.say(state=run_pb2.RUN_STATE_RUNNING, step=1)
    return lab


async def evict(lab: Any) -> None:
    """The pod gets its condition, saves, and goes; its StatefulSet makes another."""
    lab.cluster.set_status(POD, {"phase": "Running", "conditions": GOING})
    await lab.settle()
    await lab.advance(5)
    lab.new_controller()
    lab.cluster.remove(POD)
    await lab.settle()


async def test_a_drained_trainer_is_counted_as_infrastructure_and_not_as_a_failure(
    running: Any,
) -> None:
    before = running.cluster.objects()[POD]["metadata"]["uid"]
    await evict(running)
    await running.say(state=run_pb2.RUN_STATE_RUNNING, step=2)
    await running.advance(10)
    status = running.run().status
    assert (status.restarts.infra, status.restarts.total, status.attempt) == (1, 0, 0)
    assert running.condition("Failed")[0] == "False"
    assert running.cluster.objects()[POD]["metadata"]["uid"] != before
    assert status.restarts.disrupted == ()
    await evict(running)
    await running.say(state=run_pb2.RUN_STATE_RUNNING, step=3)
    await running.advance(10)
    assert running.run().status.restarts.infra == 2


async def test_a_disrupted_pod_is_counted_once_however_long_it_takes_to_go(running: Any) -> None:
    running.cluster.set_status(POD, {"phase": "Running", "conditions": GOING})
    await running.settle()
    for _ in range(3):
        await running.advance(10)
        await running.kill()
        await running.settle()
    assert running.run().status.restarts.infra == 1


@given(
    looks=st.lists(st.lists(st.integers(0, 9), unique=True), max_size=8), most=st.integers(1, 12)
)
def test_no_disrupted_pod_is_counted_twice_however_many_there_are(
    looks: list[list[int]], most: int
) -> None:
    restarts, met = Restarts(), set[int]()
    gone_before = False
    for look in looks:
        pods = [disrupted(f"pod-{number}") for number in look]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(disruptions, "MAX_REMEMBERED", most)
            restarts = disruptions.count_disruptions(restarts, {"trainer": pods})
            assert disruptions.count_disruptions(restarts, {"trainer": pods}) is restarts
        gone_before = gone_before or bool(met - set(look))
        met |= set(look)
        assert len(restarts.disrupted) <= most
    if not gone_before:
        assert restarts.infra == min(most, len(met))


def disrupted(uid: str) -> Manifest:
    return {"kind": "Pod", "metadata": {"name": uid, "uid": uid}, "status": {"conditions": GOING}}


async def test_a_drained_trainer_has_the_time_that_a_checkpoint_may_take(
    lab: Any, run_body: Any
) -> None:
    lab.cluster.upsert(run_body(checkpointing={"timeoutSeconds": 1200}))
    await lab.settle()
    assert lab.cluster.objects()[POD]["spec"]["terminationGracePeriodSeconds"] == 1230


def going(*, started: bool, restarts: int = 0, grace_s: int = 630) -> Manifest:
    """A pod that was told to go."""
    container = {"name": "trainer", "started": started, "restartCount": restarts}
    metadata = {
        "name": "demo-trainer-0",
        "namespace": "lab",
        "uid": "u",
        "deletionTimestamp": "2026-01-01T00:00:00Z",
        "deletionGracePeriodSeconds": grace_s,
    }
    return {"kind": "Pod", "metadata": metadata, "status": {"containerStatuses": [container]}}


def test_a_pod_that_is_told_to_go_while_it_starts_goes_soon() -> None:
    (told,) = disruptions.hurry_starting_pods({"trainer": [going(started=False)]})
    assert (told.uid, told.grace_s) == ("u", STARTING_GRACE_S)


@pytest.mark.parametrize(
    "pod",
    [
        going(started=True),
        going(started=False, restarts=1),
        going(started=False, grace_s=STARTING_GRACE_S),
        {**going(started=False), "status": {}},
    ],
    ids=["it may save", "it did work", "it was told before", "it has no container yet"],
)
def test_every_other_pod_has_its_time(pod: Manifest) -> None:
    assert list(disruptions.hurry_starting_pods({"trainer": [pod]})) == []
