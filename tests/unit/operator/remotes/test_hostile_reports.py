"""A controller says what it likes; the run is suspended, judged and ended all the same."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.operator.remotes.sanitize import sanitize_checkpoint, sanitize_status
from etude.v1 import run_pb2

NAN, INF = float("nan"), float("inf")
TRAINED = run_pb2.RolloutCounts(trained=1)

NONSENSE = {
    "a negative step": {"step": -1},
    "a step beyond all numbers": {"step": 2**62, "target_step": 2**62},
    "a negative version": {"policy_version": -4},
    "staleness that is no number": {"staleness_max": NAN, "rollouts": TRAINED},
    "endless staleness": {"staleness_max": INF, "rollouts": TRAINED},
    "negative staleness": {"staleness_max": -3.0, "rollouts": TRAINED},
    "a step after the last day": {"last_step_unix_ms": 2**62},
    "a step before the first day": {"last_step_unix_ms": -(2**62)},
    "negative rollouts": {"rollouts": run_pb2.RolloutCounts(in_flight=-1)},
    "a phase that fills pages": {"phase": "x" * 300},
    "a phase of negative length": {"phases": [run_pb2.PhaseProgress(name="rl", step=-1)]},
    "an endless phase": {"phases": [run_pb2.PhaseProgress(name="rl", target_step=2**62)]},
    "a gate of its own": {"phases": [run_pb2.PhaseProgress(name="rl", gate="Passed")]},
    "a reason that fills pages": {"reason": "why\n" * 90, "message": "x" * 9_000},
}


@pytest.mark.parametrize("nonsense", NONSENSE.values(), ids=NONSENSE.keys())
async def test_a_run_whose_controller_talks_nonsense_can_be_suspended(
    lab: Any, run_body: Any, nonsense: dict[str, Any]
) -> None:
    gated = _gated(run_body)
    lab.cluster.upsert(run_body(**gated))
    await lab.settle()
    await lab.say(**{"state": run_pb2.RUN_STATE_RUNNING, **nonsense})
    lab.cluster.upsert(run_body(**gated, suspend=True))
    await lab.settle()
    await lab.advance(700)  # the checkpoint never comes
    await lab.advance(700)
    assert lab.condition("Suspended") == ("True", "ByUser")
    assert not lab.pods("trainer")


def _gated(run_body: Any) -> dict[str, Any]:
    phases = run_body()["spec"]["phases"]
    phases[-1]["gate"] = {"evaluation": "held-out", "value": "0.5"}
    tasks = phases[-1]["tasks"][0]
    return {
        "phases": phases,
        "evaluation": [{"name": "held-out", "phase": "rl", "tasks": {**tasks, "name": "h"}}],
    }


async def test_reports_from_before_the_first_are_not_taken_for_news(
    lab: Any, run_body: Any
) -> None:
    lab.cluster.upsert(run_body())
    await lab.settle()
    lab.epoch, lab.sequence = 1, -9
    await lab.say(state=run_pb2.RUN_STATE_RUNNING, step=1)
    await lab.tell_event("Started")
    assert lab.run().status.reported.sequence >= 0


@given(
    ints=st.integers(-(2**63), 2**63 - 1),
    doubles=st.floats(),
    text=st.text(max_size=2_000),
)
def test_whatever_is_said_fits_into_a_status(ints: int, doubles: float, text: str) -> None:
    said = run_pb2.RunStatus()
    for field in said.DESCRIPTOR.fields:
        if field.name in {"step", "target_step", "policy_version", "last_step_unix_ms"}:
            setattr(said, field.name, ints)
        elif field.cpp_type == field.CPPTYPE_DOUBLE:
            setattr(said, field.name, doubles)
        elif field.cpp_type == field.CPPTYPE_STRING and field.is_repeated:
            getattr(said, field.name).extend([text, text])
        elif field.cpp_type == field.CPPTYPE_STRING:
            setattr(said, field.name, text)
    found = sanitize_status(said)
    assert 0 <= found.step < 2**53
    assert 0 <= found.staleness_max < INF
    assert 0 <= found.productive_seconds < INF
    assert len(found.phase) <= 63
    assert len(found.reason) <= 64
    assert sanitize_status(found).SerializeToString(deterministic=True) == found.SerializeToString(
        deterministic=True
    )


@given(
    step=st.integers(0, 2**53 - 1),
    seconds=st.floats(0, 1e9),
    reward=st.floats(-1e9, 1e9),
)
def test_what_can_be_is_left_as_it_was_said(step: int, seconds: float, reward: float) -> None:
    said = run_pb2.RunStatus(
        state=run_pb2.RUN_STATE_RUNNING,
        phase="rl",
        step=step,
        reward_mean=reward,
        productive_seconds=seconds,
        rollouts=run_pb2.RolloutCounts(completed=3),
    )
    assert sanitize_status(said) == said


async def test_figures_of_a_checkpoint_that_are_none_keep_nothing_from_its_run(
    lab: Any, run_body: Any
) -> None:
    lab.cluster.upsert(run_body(checkpointing={"keepLast": 1, "keepBest": {"metric": "Reward"}}))
    await lab.settle()
    await lab.say(state=run_pb2.RUN_STATE_RUNNING, step=1)
    for step, reward in ((10, "0.9"), (20, "abc"), (30, "nan")):
        await lab.tell(record(step=step, metrics={"reward": reward}))
        await lab.finish_jobs()
        await lab.advance(5)
    await lab.finish_jobs()
    assert lab.run().status.best_checkpoint.step == 10
    assert lab.run().status.last_checkpoint.step == 30
    kept = {m["spec"]["step"] for k, m in lab.cluster.objects().items() if k.kind == "Checkpoint"}
    assert kept == {10, 30}


def test_of_a_checkpoint_as_many_figures_are_kept_as_its_object_has_room_for() -> None:
    said = record(step=-1, size_bytes=2**62, metrics={f"m{i:02}": "1" for i in range(40)})
    said.metrics["a" * 65] = said.metrics["huge"] = "1" * 65
    found = sanitize_checkpoint(said)
    assert (found.step, found.size_bytes) == (0, 2**53 - 1)
    assert sorted(found.metrics) == [f"m{i:02}" for i in range(32)]
    assert sanitize_checkpoint(found) == found
    assert sanitize_checkpoint(record(metrics={"reward": "0.5"})) == record(
        metrics={"reward": "0.5"}
    )


def record(**said: Any) -> run_pb2.CheckpointRecord:
    step = said.get("step", 7)
    known = {"reason": "Scheduled", "uri": f"s3://runs/demo/{step}", "size_bytes": 10}
    digest = f"{max(0, step):064x}"
    return run_pb2.CheckpointRecord(**{"manifest_digest": digest, "step": step, **known, **said})
