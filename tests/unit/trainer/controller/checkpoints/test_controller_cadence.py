"""When checkpoints are due, and whose they are."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.trainer_simulation.workers import SimulatedLearners

from etude.common.api.run.checkpointing import EVERY_STEPS, Checkpointing
from etude.common.checkpoints.manifest import Reason
from etude.common.errors import StoreError
from etude.trainer.controller.checkpoints import cadence
from etude.trainer.controller.checkpoints.cadence import REST, CheckpointCadence, CheckpointRequests
from etude.trainer.controller.checkpoints.saver import CheckpointSaver
from etude.trainer.controller.run import Run
from etude.v1 import run_pb2

MakeWorld = Callable[..., Any]
SFT_STEPS = 4
FAR = 100_000


def manifests(world: Any) -> dict[int, dict[str, Any]]:
    """Each checkpoint of a world, by its step."""
    keys = sorted(k for k in world.store.objects if k.endswith("/manifest.json"))
    found = [json.loads(world.store.get(key)) for key in keys]
    return {each["step"]: each for each in found}


@given(
    every_steps=st.none() | st.integers(1, 7),
    every_seconds=st.none() | st.integers(10, 60),
    durations=st.lists(st.integers(1, 40), max_size=40),
)
def test_no_more_than_the_cadence_passes_between_two_checkpoints(
    every_steps: int | None, every_seconds: int | None, durations: list[int]
) -> None:
    wanted = Checkpointing(every_steps=every_steps, every_seconds=every_seconds)
    cadence = CheckpointCadence()
    cadence.restart(0.0)
    now_s = last_s = 0.0
    last_step = 0
    for step, duration in enumerate(durations, start=1):
        now_s += duration
        cadence.count_step(wanted, step=step, now_s=now_s)
        late = every_seconds is not None and now_s - last_s >= every_seconds
        steps = wanted.steps_between
        assert cadence.is_due == (late or (steps is not None and step % steps == 0))
        if steps is not None:
            assert step - last_step <= steps
        if cadence.is_due:
            cadence.restart(now_s)
            last_s, last_step = now_s, step
        assert not cadence.is_due


def test_a_run_without_a_cadence_saves_every_few_steps() -> None:
    assert Checkpointing().steps_between == EVERY_STEPS
    assert Checkpointing(every_seconds=600).steps_between is None
    assert Checkpointing(every_seconds=600, every_steps=3).steps_between == 3


async def test_with_seconds_alone_only_a_step_that_ends_later_is_saved(
    make_world: MakeWorld,
) -> None:
    world = make_world(checkpointing={"everySeconds": FAR})

    def prepare(run: Run) -> None:
        assert isinstance(run.learners, SimulatedLearners)
        learners = run.learners

        def later() -> None:
            if len(learners.trained) == 3:
                run.checkpoints.cadence.restart(-2.0 * FAR)

        learners.after_step = later

    assert await world.train(prepare)
    reasons = {step: each["reason"] for step, each in manifests(world).items()}
    assert reasons == {3: "Scheduled", SFT_STEPS: "PhaseEnd", 10: "Final"}


async def test_each_request_gets_a_checkpoint_of_its_own_and_no_second_one(
    make_world: MakeWorld,
) -> None:
    world = make_world(every_steps=2)

    def prepare(run: Run) -> None:
        for number, request in enumerate(("a", "b", "a")):
            now = run_pb2.CheckpointNow(request=request)
            run.commands.accept(run_pb2.CommandRequest(command_id=f"c{number}", checkpoint=now))

    assert await world.train(prepare)
    made = manifests(world)
    assert {step: each["request"] for step, each in made.items() if each["request"]} == {
        1: "a",
        2: "b",
    }
    assert (made[1]["reason"], made[2]["reason"]) == ("Manual", "Manual")
    for step in (1, 2):
        assert f"checkpoints/{step:012d}/model/config.json" in world.store.objects
    told = [
        r.checkpoint.request
        for r in world.runs[0].reporter.reports._happenings
        if r.WhichOneof("body") == "checkpoint"
    ]
    assert [each for each in told if each] == ["a", "b"]


@pytest.mark.parametrize(
    ("rests", "tries"),
    [(60.0, [1]), (0.0, [1, 3, 5, 7, 9])],
    ids=["within its rest", "between scheduled ones"],
)
async def test_a_request_that_cannot_be_saved_keeps_no_scheduled_checkpoint_away(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch, rests: float, tries: list[int]
) -> None:
    monkeypatch.setattr(cadence, "LEAST_REST_S", rests)
    monkeypatch.setattr(cadence, "REST", rests)
    world, tried, begin = make_world(every_steps=2), [], CheckpointSaver.begin

    async def refuse(self: CheckpointSaver, state: Any, *, reason: Reason, **fields: Any) -> Any:
        if reason != "Manual":
            return await begin(self, state, reason=reason, **fields)
        tried.append(state.cursor.global_step)
        raise StoreError("the model does not fit")

    monkeypatch.setattr(CheckpointSaver, "begin", refuse)

    def prepare(run: Run) -> None:
        now = run_pb2.CheckpointNow(request="a")
        run.commands.accept(run_pb2.CommandRequest(command_id="1", checkpoint=now))

    assert await world.train(prepare)
    reasons = {step: each["reason"] for step, each in manifests(world).items()}
    scheduled = dict.fromkeys((2, 6, 8), "Scheduled")
    assert reasons == {**scheduled, SFT_STEPS: "PhaseEnd", 10: "Final"}
    assert tried == tries


def test_a_request_rests_by_what_its_try_took_and_then_has_its_turn_again() -> None:
    asked = CheckpointRequests()
    asked.add("a")
    assert asked.next_request(is_due=True) == "a"
    asked.mark_failed(0.0, 600.0)
    for now_s, turn in ((601.0, ""), (599.0 + REST * 600.0, ""), (600.0 + REST * 600.0, "a")):
        asked.count_step(now_s)
        assert asked.next_request(is_due=False) == turn
    assert asked.next_request(is_due=True) == "", "what was due meanwhile goes first"
    asked.note_other_checkpoint()
    assert asked.next_request(is_due=True) == "a", "however often something is due"


async def test_a_new_controller_knows_which_requests_have_their_checkpoint(
    make_world: MakeWorld,
) -> None:
    world = make_world(every_steps=100)
    now = run_pb2.CheckpointNow(request="a")
    order = run_pb2.CommandRequest(command_id="before", checkpoint=now)

    def once(run: Run) -> None:
        run.commands.accept(order)
        assert isinstance(run.learners, SimulatedLearners)
        run.learners.steps_until_crash = 2

    with pytest.raises(ExceptionGroup):
        await world.train(once)

    def again(run: Run) -> None:
        assert isinstance(run.learners, SimulatedLearners)
        learners = run.learners

        def ask() -> None:
            run.commands.accept(run_pb2.CommandRequest(command_id="after", checkpoint=now))

        learners.after_step = ask

    assert await world.train(again)
    assert [step for step, each in manifests(world).items() if each["request"]] == [1]


async def test_the_last_checkpoint_of_a_run_that_fails_says_so(make_world: MakeWorld) -> None:
    world = make_world(every_steps=100)

    def prepare(run: Run) -> None:
        assert isinstance(run.learners, SimulatedLearners)
        last = run_pb2.SuspendRun(checkpoint=True, is_failure=True)
        order = run_pb2.CommandRequest(command_id="1", suspend=last)
        run.learners.after_step = lambda: run.commands.accept(order)

    assert not await world.train(prepare)
    assert [each["reason"] for each in manifests(world).values()] == ["Failure"]
