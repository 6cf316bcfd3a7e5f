"""What watchers see of a run, and what they may order."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from etude.common.api.run.spec import RLRunSpec
from etude.common.checkpoints.manifest import CheckpointManifest, CheckpointObject, StoredCheckpoint
from etude.common.errors import InvalidFieldError
from etude.trainer.controller.program import (
    FIRST_STEPS_LIMIT_S,
    current_silence_limit_s,
    silence_limit_s,
)
from etude.trainer.controller.progress import slow_step_s
from etude.trainer.controller.reporting.commands import RunCommands
from etude.trainer.controller.reporting.reports import RunReports
from etude.v1 import run_pb2


async def read(reports: RunReports, count: int, *, epoch: int = 0, after: int = 0) -> list[Any]:
    found: list[Any] = []
    async with asyncio.timeout(10):
        async for report in reports.watch(epoch=epoch, after_sequence=after):
            found.append(report)
            if len(found) == count:
                return found
    raise AssertionError("the stream ended")


def checkpoint(step: int) -> StoredCheckpoint:
    item = CheckpointObject(key="controller.json", size=3, blake3="0" * 64)
    manifest = CheckpointManifest(
        run="u",
        step=step,
        phase="rl",
        phase_step=step,
        epoch=2,
        policy_version=step,
        reason="Scheduled",
        objects=[item],
    )
    return StoredCheckpoint(manifest, f"checkpoints/{step:012d}/", "d" * 64)


async def test_happenings_come_in_order_and_only_the_newest_status() -> None:
    reports = RunReports("u", 2)
    for step in range(5):
        reports.status.step = step
        reports.mark_changed()
    reports.add_event("Resumed", "from the checkpoint of step 3")
    reports.add_checkpoint(checkpoint(4), uri="file:///run/checkpoints/4")
    found = await read(reports, 3)
    assert [r.WhichOneof("body") for r in found] == ["event", "checkpoint", "status"]
    assert found[2].status.step == 4
    assert found[1].checkpoint.manifest_digest == "d" * 64
    assert {(r.run_uid, r.epoch) for r in found} == {("u", 2)}


async def test_a_watcher_resumes_after_a_known_position() -> None:
    reports = RunReports("u", 2)
    reports.add_event("A", "first")
    reports.add_event("B", "second")
    seen = (await read(reports, 2))[0].sequence
    assert [r.event.reason for r in await read(reports, 1, epoch=2, after=seen)] == ["B"]


async def test_a_position_of_an_earlier_epoch_means_from_the_start() -> None:
    reports = RunReports("u", 2)
    reports.add_event("A", "first")
    assert (await read(reports, 1, epoch=1, after=99))[0].event.reason == "A"


async def test_p03_who_listens_anew_hears_the_newest_status_however_old_it_is() -> None:
    reports = RunReports("u", 2)
    reports.set_state(run_pb2.RUN_STATE_EVALUATING)
    reports.add_event("A", "first")
    known = (await read(reports, 2))[0].sequence
    (again,) = await read(reports, 1, epoch=2, after=known)
    assert again.status.state == run_pb2.RUN_STATE_EVALUATING


async def test_a_watcher_is_told_a_status_once() -> None:
    reports = RunReports("u", 2)
    reports.set_state(run_pb2.RUN_STATE_RUNNING)
    reading = asyncio.create_task(read(reports, 2))
    while not reading.done():
        await asyncio.sleep(0.01)
        reports.add_event("A", "first")
    assert [r.WhichOneof("body") for r in reading.result()].count("status") == 1


async def test_a_waiting_watcher_is_woken() -> None:
    reports = RunReports("u", 1)
    waiting = asyncio.create_task(read(reports, 1))
    await asyncio.sleep(0.01)
    reports.set_state(run_pb2.RUN_STATE_RUNNING)
    assert (await waiting)[0].status.state == run_pb2.RUN_STATE_RUNNING


SPEC: dict[str, Any] = {
    "model": {"uri": "file:///m"},
    "storage": {"uri": "file:///s"},
    "phases": [
        {
            "name": "sft",
            "type": "SupervisedFineTuning",
            "maxSteps": 1,
            "optimizer": {"learningRate": "1"},
            "data": [{"name": "d", "uri": "file:///d"}],
        }
    ],
    "roles": {},
}


def orders() -> RunCommands:
    return RunCommands(RLRunSpec.model_validate(SPEC), 3)


def configured(given: RunCommands, generation: int, **changed: object) -> None:
    spec_json = json.dumps(SPEC | changed)
    order = run_pb2.ConfigureRun(spec_json=spec_json, generation=generation)
    given.accept(run_pb2.CommandRequest(command_id=f"c{generation}", configure=order))


def test_a_command_with_a_known_id_changes_nothing() -> None:
    given = orders()
    command = run_pb2.CommandRequest(command_id="1", checkpoint=run_pb2.CheckpointNow())
    given.accept(command)
    given.wants_checkpoint = False
    given.accept(command)
    assert not given.wants_checkpoint


def test_suspending_and_stopping_halt_the_controller() -> None:
    given = orders()
    suspend = run_pb2.SuspendRun(checkpoint=True)
    given.accept(run_pb2.CommandRequest(command_id="1", suspend=suspend))
    assert given.stop_requested.is_set()
    given = orders()
    given.request_stop()
    assert given.stop_requested.is_set()


def test_a_spec_of_a_later_operator_is_taken_over() -> None:
    given = orders()
    configured(given, 4, ofTheFuture={"is": "strange"}, checkpointing={"everySteps": 7, "new": 1})
    assert (given.generation, given.spec.checkpointing.every_steps) == (4, 7)


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (run_pb2.CommandRequest(checkpoint=run_pb2.CheckpointNow()), "command_id"),
        (run_pb2.CommandRequest(command_id="1"), "what"),
        (
            run_pb2.CommandRequest(
                command_id="1", configure=run_pb2.ConfigureRun(spec_json="{", generation=9)
            ),
            "configure.spec_json",
        ),
    ],
)
def test_a_bad_command_names_its_field(request_: run_pb2.CommandRequest, field: str) -> None:
    given = orders()
    with pytest.raises(InvalidFieldError) as caught:
        given.accept(request_)
    assert caught.value.field == field
    assert given.generation == 3


def test_a_spec_that_was_delivered_late_is_ignored() -> None:
    given = orders()
    configured(given, 2, checkpointing={"everySteps": 7})
    assert given.generation == 3
    assert given.checkpointing.every_steps != 7
    configured(given, 4, checkpointing={"everySteps": 7})
    assert given.generation == 4
    assert given.checkpointing.every_steps == 7


def test_a_field_that_is_fixed_is_named_and_nothing_is_taken_over() -> None:
    given = orders()
    longer = [{**SPEC["phases"][0], "maxSteps": 9}]
    with pytest.raises(InvalidFieldError, match="phases"):
        configured(given, 4, phases=longer, checkpointing={"everySteps": 7})
    assert given.generation == 3
    assert given.checkpointing.every_steps != 7


def test_dumping_stacks_needs_no_event_loop(caplog: pytest.LogCaptureFixture) -> None:
    orders().accept(run_pb2.CommandRequest(command_id="1", dump_stacks=run_pb2.DumpStacks()))
    assert "test_dumping_stacks_needs_no_event_loop" in caplog.text


def test_silence_is_judged_by_the_deadline_or_by_measured_steps() -> None:
    assert silence_limit_s(42, [1.0] * 100) == 42
    assert silence_limit_s(None, [1.0]) == FIRST_STEPS_LIMIT_S
    assert silence_limit_s(None, [1.0] * 100) == 300
    assert silence_limit_s(None, [1.0] * 90 + [200.0] * 10) == 600


def test_checkpoints_and_evaluations_have_limits_of_their_own(
    make_world: Callable[..., Any],
) -> None:
    checkpointing = {"everySteps": 2, "keepLast": 2, "timeoutSeconds": 400}
    deadlines = {"stepProgressSeconds": 60}
    run, _, _ = make_world(checkpointing=checkpointing, deadlines=deadlines).start()
    limits = {
        run_pb2.RUN_STATE_RUNNING: 60,
        run_pb2.RUN_STATE_CHECKPOINTING: 430,
        run_pb2.RUN_STATE_EVALUATING: 3_600,
    }
    run.reporter.status.last_step_unix_ms = 1
    for state, limit_s in limits.items():
        run.reporter.set_state(state)
        assert current_silence_limit_s(run) == limit_s


def test_a_controller_has_an_hour_for_its_first_step(make_world: Callable[..., Any]) -> None:
    run, _, _ = make_world(deadlines={"stepProgressSeconds": 60}).start()
    run.progress.figures.step_seconds = [1.0] * 100  # of the controller before it
    assert current_silence_limit_s(run) == FIRST_STEPS_LIMIT_S


def test_the_slow_step_is_the_one_in_a_hundred() -> None:
    assert slow_step_s([]) == 0
    assert slow_step_s([3.0]) == 3
    assert slow_step_s([1.0] * 150 + [9.0] * 2) == 9
