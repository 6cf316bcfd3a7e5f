"""Idle roles are released during a supervised phase, and ready again in time."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.common.api.kinds import RLRun
from etude.common.api.run.status import Released
from etude.operator.actions import ClockReading
from etude.operator.manifests import Manifest, Ref
from etude.operator.remotes.report_store import RunReport
from etude.operator.runs.capacity import idle_roles
from etude.operator.runs.observe import ObservedRun
from etude.v1 import run_pb2

LONG = 100_000


def phases(*, sft_steps: int = LONG, rl: bool = True, **sft: Any) -> list[dict[str, Any]]:
    optimizer = {"learningRate": "3e-3"}
    found: list[dict[str, Any]] = [
        {
            "name": "sft",
            "type": "SupervisedFineTuning",
            "maxSteps": sft_steps,
            "optimizer": optimizer,
            "data": [{"name": "traces", "uri": "s3://inputs/traces.jsonl"}],
            **sft,
        }
    ]
    if rl:
        tasks = [{"name": "train", "uri": "s3://inputs/tasks", "environment": "repos"}]
        found.append(
            {
                "name": "rl",
                "type": "ReinforcementLearning",
                "maxSteps": 40,
                "optimizer": optimizer,
                "tasks": tasks,
                "algorithm": {"name": "DrGRPO"},
            }
        )
    return found


async def supervised(lab: Any, step: int, *, pace_s: float = 1.0) -> None:
    """The controller says how far it is, and the operator has the time to write it down."""
    await lab.say(state=run_pb2.RUN_STATE_RUNNING, phase="sft", step=step, step_seconds_p50=pace_s)
    await lab.advance(2)


def replicas(lab: Any, role: str) -> int:
    found: Manifest = lab.cluster.objects()[Ref("StatefulSet", "lab", f"demo-{role}")]
    count: int = found["spec"]["replicas"]
    return count


def nodes(lab: Any) -> int:
    (pool,) = lab.names("EnvPool")
    count: int = lab.cluster.objects()[Ref("EnvPool", "lab", pool)]["spec"]["replicas"]
    return count


def held(lab: Any) -> tuple[int, ...]:
    return (*(replicas(lab, role) for role in ("trainer", "inference", "rewards")), nodes(lab))


ALL, TRAINER = (1, 2, 1, 2), (1, 0, 0, 0)


async def test_roles_go_in_a_long_supervised_phase_and_are_back_before_it_ends(
    lab: Any, run_body: Any
) -> None:
    lab.cluster.upsert(run_body(phases=phases()))
    await lab.settle()
    assert held(lab) == ALL, "nobody knows yet how long anything takes"
    await supervised(lab, 3)
    assert held(lab) == TRAINER
    assert not lab.pods("inference")
    assert lab.condition("Ready") == ("True", "ControllerConnected")
    assert lab.condition("EnvironmentsReady") == ("True", "NotNeeded")
    assert {r.name: r.desired for r in lab.run().status.roles} == {
        "trainer": 1,
        "inference": 0,
        "rewards": 0,
    }
    await lab.kill()
    await lab.settle()
    assert held(lab) == TRAINER
    await supervised(lab, LONG - 5)
    assert held(lab) == ALL
    await supervised(lab, LONG - 4)
    assert held(lab) == ALL
    assert lab.run().status.released is None


async def test_a_faster_pace_brings_them_back(lab: Any, run_body: Any) -> None:
    lab.cluster.upsert(run_body(phases=phases()))
    await lab.settle()
    await supervised(lab, 3)
    await supervised(lab, LONG - 1000, pace_s=1.0)
    assert held(lab) == TRAINER
    await supervised(lab, LONG - 1000, pace_s=0.001)
    assert held(lab) == ALL


@pytest.mark.parametrize(
    ("changed", "scheduling"),
    [
        ({}, {"idleRoles": "Hold"}),
        ({"sft_steps": 30}, {}),
        ({"successPolicy": {"metric": "Loss", "op": "AtMost", "value": "1"}}, {}),
    ],
)
async def test_they_stay_where_they_are_wanted_soon_or_nobody_knows_when(
    lab: Any, run_body: Any, changed: dict[str, Any], scheduling: dict[str, Any]
) -> None:
    lab.cluster.upsert(run_body(phases=phases(**changed), scheduling=scheduling))
    await lab.settle()
    await supervised(lab, 3)
    assert held(lab) == ALL


async def test_they_never_start_where_no_phase_samples(lab: Any, run_body: Any) -> None:
    lab.cluster.upsert(run_body(phases=phases(sft_steps=5, rl=False)))
    await lab.settle()
    assert held(lab) == TRAINER, "engines for evaluations are made by those"
    await supervised(lab, 1, pace_s=0.0)
    assert held(lab) == TRAINER
    assert lab.condition("EnvironmentsReady") == ("True", "NotNeeded")


async def test_they_go_for_good_where_nothing_samples_any_more(lab: Any, run_body: Any) -> None:
    sft, sampling = phases(sft_steps=5)
    last = {**sft, "name": "last", "maxSteps": 5}
    lab.cluster.upsert(run_body(phases=[sampling, last]))
    await lab.settle()
    assert held(lab) == ALL
    await lab.say(state=run_pb2.RUN_STATE_RUNNING, phase="last", step=1, step_seconds_p50=0.0)
    await lab.advance(2)
    assert held(lab) == TRAINER


async def test_a_run_of_a_trainer_alone_has_nothing_to_let_go(lab: Any, run_body: Any) -> None:
    lab.cluster.upsert(run_body(phases=phases(rl=False), roles={"trainer": {}}))
    await lab.settle()
    await supervised(lab, 1)
    assert lab.run().status.released is None


async def test_reinforcement_learning_has_them_at_once(lab: Any, run_body: Any) -> None:
    lab.cluster.upsert(run_body(phases=phases()))
    await lab.settle()
    await supervised(lab, 3)
    assert held(lab) == TRAINER
    await lab.say(state=run_pb2.RUN_STATE_RUNNING, phase="rl", step=0)
    await lab.advance(2)
    assert held(lab) == ALL


@pytest.mark.parametrize(
    "scheduling", [{"workload": "JobSet"}, {"admission": "Workload", "queueName": "q"}]
)
async def test_what_holds_a_fixed_number_of_pods_needs_roles_that_stay(
    lab: Any, run_body: Any, scheduling: dict[str, Any]
) -> None:
    run = RLRun.model_validate(run_body(phases=phases(), scheduling=scheduling))
    assert "set idleRoles: Hold" in idle_roles.idle_roles_problem(run)
    for fitting in (
        run_body(phases=phases(), scheduling={**scheduling, "idleRoles": "Hold"}),
        run_body(phases=phases(rl=False), scheduling=scheduling),
    ):
        assert not idle_roles.idle_roles_problem(RLRun.model_validate(fitting))


RUN = {
    "metadata": {"name": "demo", "namespace": "lab", "uid": "uid-run"},
    "spec": {
        "model": {"uri": "s3://inputs/model"},
        "storage": {"uri": "s3://runs/demo"},
        "phases": phases(),
        "roles": {
            "inference": {},
            "environments": [{"name": "repos", "template": "a", "poolRef": {"name": "pool"}}],
            "rewards": {"functions": [{"name": "tests", "function": "Verifier"}]},
        },
    },
}


@given(
    step=st.integers(0, LONG),
    pace_s=st.floats(0.001, 100),
    took_s=st.integers(0, 3600),
    is_released=st.booleans(),
)
def test_roles_are_never_away_when_less_time_is_left_than_they_need(
    step: int, pace_s: float, took_s: int, *, is_released: bool
) -> None:
    roles = [
        {"name": "trainer", "desired": 1, "ready": 1},
        {"name": "inference", "desired": 2, "ready": 2, "startupSeconds": took_s},
    ]
    before = Released(since="2026-01-01T00:00:00Z") if is_released else None
    run = RLRun.model_validate({**RUN, "status": {"roles": roles}})
    run = run.model_copy(update={"status": run.status.model_copy(update={"released": before})})
    said = run_pb2.RunStatus(phase="sft", step=step, step_seconds_p50=pace_s)
    report = RunReport(status=said, is_connected=True)
    found = idle_roles.decide_released(
        run, ObservedRun(report=report), ClockReading(wall_s=1e9, monotonic_s=0.0)
    )
    left_s = (LONG - step) * pace_s
    if left_s <= took_s:
        assert found is None
    if found is not None and not is_released:
        assert left_s > 2 * took_s
