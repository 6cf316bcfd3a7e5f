"""Status of a run's phases."""

from typing import Any

from etude.common.api.run.status import PhaseStatus
from etude.v1 import run_pb2

Progress = run_pb2.PhaseProgress
GATE = {"evaluation": "held-out", "value": "0.5"}
HELD_OUT = {
    "name": "held-out",
    "phase": "rl",
    "tasks": {"name": "held-out", "uri": "s3://b/h", "environment": "repos"},
}


def body(run_body: Any) -> dict[str, Any]:
    made: dict[str, Any] = run_body(evaluation=[HELD_OUT])
    made["spec"]["phases"][1]["gate"] = GATE
    return made


def shown(lab: Any) -> list[tuple[str, str, int, str | None]]:
    found: tuple[PhaseStatus, ...] = lab.run().status.phases
    return [(phase.name, phase.state, phase.step, phase.gate) for phase in found]


async def test_a_run_shows_how_far_each_phase_is(lab: Any, run_body: Any) -> None:
    lab.cluster.upsert(body(run_body))
    await lab.settle()
    assert shown(lab) == [("sft", "Waiting", 0, None), ("rl", "Waiting", 0, "Pending")]
    sft = Progress(name="sft", step=4, target_step=10)
    await lab.say(state=run_pb2.RUN_STATE_RUNNING, phase="sft", step=4, phases=[sft])
    assert shown(lab)[0] == ("sft", "Active", 4, None)
    done = [Progress(name="sft", step=7, target_step=10, is_done=True)]
    rl = Progress(name="rl", step=2, target_step=40)
    await lab.say(state=run_pb2.RUN_STATE_RUNNING, phase="rl", step=2, phases=[*done, rl])
    assert shown(lab) == [("sft", "Done", 7, None), ("rl", "Active", 2, "Pending")]
    assert [phase.target for phase in lab.run().status.phases] == [10, 40]
    met = Progress(name="rl", step=40, target_step=40, is_done=True, gate="Met")
    await lab.say(state=run_pb2.RUN_STATE_DONE, phase="rl", step=40, phases=[*done, met])
    assert shown(lab)[1] == ("rl", "Done", 40, "Met")


async def test_a_new_operator_remembers_what_the_controller_said(lab: Any, run_body: Any) -> None:
    lab.cluster.upsert(body(run_body))
    await lab.settle()
    sft = Progress(name="sft", step=4, target_step=10)
    await lab.say(state=run_pb2.RUN_STATE_RUNNING, phase="sft", step=4, phases=[sft])
    await lab.advance(5)
    before = shown(lab)
    assert before[0] == ("sft", "Active", 4, None)
    lab.new_controller()
    await lab.kill()
    await lab.settle()
    assert shown(lab) == before


async def test_phases_that_a_run_which_failed_never_began_are_skipped(
    lab: Any, run_body: Any
) -> None:
    lab.cluster.upsert(body(run_body))
    await lab.settle()
    sft = Progress(name="sft", step=4, target_step=10)
    await lab.say(
        state=run_pb2.RUN_STATE_FAILED, phase="sft", step=4, phases=[sft], reason="InvalidSpec"
    )
    await lab.advance(60)
    assert lab.condition("Failed")[0] == "True"
    assert shown(lab) == [("sft", "Active", 4, None), ("rl", "Skipped", 0, "Pending")]
