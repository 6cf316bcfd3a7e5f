"""Phases that end early, and gates between them."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.trainer_simulation.workers import SimulatedLearners

from etude.common.api.run.phase_goals import Gate, meets_threshold
from etude.trainer.controller.checkpoints.state import EvaluationResult
from etude.trainer.controller.phases import targets
from etude.trainer.controller.phases.targets import GateNotMetError
from etude.trainer.controller.run import Run, root_cause

MakeWorld = Callable[..., Any]
SFT_STEPS = 4
RL_STEPS = 6


def world_of(make_world: MakeWorld, *, sft: Any = None, rl: Any = None, **fields: Any) -> Any:
    """A run whose two phases have these further fields."""
    given_spec = make_world(**fields).spec
    for phase, more in zip(given_spec["phases"], (sft, rl), strict=True):
        phase.update(more or {})
    return make_world(given=given_spec)


def events(world: Any) -> list[str]:
    return [row["reason"] for row in world.rows("event")]


@given(st.floats(-1e3, 1e3), st.decimals(-1000, 1000, places=3))
def test_every_figure_is_at_least_or_at_most_a_value_and_both_only_where_they_are_equal(
    figure: float, value: Any
) -> None:
    least, most = (meets_threshold(figure, op, str(value)) for op in ("AtLeast", "AtMost"))
    assert least or most
    assert (least and most) == (figure == float(value))


def test_what_is_no_number_reaches_nothing() -> None:
    assert not meets_threshold(float("nan"), "AtLeast", "0")
    assert not meets_threshold(float("nan"), "AtMost", "0")


async def test_a_supervised_phase_ends_once_its_loss_is_low_enough(make_world: MakeWorld) -> None:
    target = {"metric": "Loss", "op": "AtMost", "value": "9", "windowSteps": 2}
    world = world_of(make_world, sft={"successPolicy": target})
    assert await world.train()
    run = world.runs[0]
    assert run.progress.cursor.ends == {"sft": 2}
    assert run.progress.cursor.global_step == 2 + RL_STEPS
    manifests = sorted(k for k in world.store.objects if k.endswith("/manifest.json"))
    reasons = {
        json.loads(world.store.get(k))["step"]: json.loads(world.store.get(k))["reason"]
        for k in manifests
    }
    assert reasons[2] == "PhaseEnd"
    assert "TargetReached" in events(world)


@pytest.mark.parametrize("staleness", [0, 2])
async def test_a_phase_that_ends_early_is_evaluated_and_accounts_for_what_it_began(
    make_world: MakeWorld, staleness: int
) -> None:
    target = {"metric": "Success", "op": "AtLeast", "value": "0", "windowSteps": 2}
    world = world_of(make_world, rl={"successPolicy": target}, staleness=staleness)
    assert await world.train()
    run = world.runs[0]
    assert run.progress.cursor.ends == {"rl": 2}
    assert [row["step"] for row in world.rows("eval")] == [0, 2]
    found = world.audit(max_staleness=staleness)
    assert found.findings == []
    assert found.trained == 12
    assert found.accepted == found.trained + found.dropped.total()
    targets.report_done(run.reporter)
    assert run.reporter.status.reason == "TargetReached"


@pytest.mark.parametrize("after", range(SFT_STEPS + 3))
async def test_a_run_that_dies_ends_its_phase_at_the_same_step(
    make_world: MakeWorld, after: int
) -> None:
    target = {"metric": "Success", "op": "AtLeast", "value": "0", "windowSteps": 3}
    straight = world_of(make_world, rl={"successPolicy": target})
    assert await straight.train()
    world = world_of(make_world, rl={"successPolicy": target})
    await world.crash(after=after)
    assert await world.train()
    assert world.runs[-1].progress.cursor.ends == straight.runs[0].progress.cursor.ends == {"rl": 3}
    assert world.digest == straight.digest
    assert world.audit(max_staleness=0).findings == []


async def test_a_target_that_is_never_reached_changes_nothing(
    make_world: MakeWorld, uninterrupted: str
) -> None:
    target = {"metric": "Reward", "op": "AtLeast", "value": "2"}
    world = world_of(make_world, rl={"successPolicy": target})
    assert await world.train()
    assert world.digest == uninterrupted
    targets.report_done(world.runs[0].reporter)
    assert world.runs[0].reporter.status.reason == ""


async def test_a_step_that_the_platform_lost_as_a_whole_says_nothing_of_rewards(
    make_world: MakeWorld,
) -> None:
    target = {"metric": "Reward", "op": "AtMost", "value": "0", "windowSteps": 1}
    lossy = {"rollout": {"maxInfraFailurePercent": 100}, "successPolicy": target}
    world = world_of(make_world, rl=lossy)

    def lose_all(run: Run) -> None:
        run.progress.figures.reward_ewma = 0.75
        run.reporter.status.reward_mean = 0.5

    world.fault_share = 1.0
    assert await world.train(lose_all)
    (run,) = world.runs
    assert run.progress.cursor.ends == {}, "no target was reached"
    assert (run.progress.figures.reward_ewma, run.reporter.status.reward_mean) == (0.75, 0.5)


def test_a_gate_compares_what_it_names_and_fails_what_was_not_measured() -> None:
    found = {"held-out": EvaluationResult(success=0.5, greedy_success=0.25)}
    assert targets.gate_failure(Gate(evaluation="held-out", value="0.5"), found) == ""
    greedy = Gate(evaluation="held-out", metric="GreedySuccess", value="0.5")
    wanted = "GreedySuccess of held-out must be AtLeast 0.5"
    assert targets.gate_failure(greedy, found) == f"{wanted}, and is 0.25"
    assert targets.gate_failure(greedy, {}) == f"{wanted}, and was not measured"
    most = Gate(evaluation="held-out", op="AtMost", value="0.4")
    assert targets.gate_failure(most, found).endswith("and is 0.5")


async def test_a_gate_that_holds_lets_the_run_go_on(
    make_world: MakeWorld, uninterrupted: str
) -> None:
    world = world_of(make_world, rl={"gate": {"evaluation": "held-out", "value": "0"}})
    assert await world.train()
    assert world.digest == uninterrupted
    assert "GateNotMet" not in events(world)


async def test_a_gate_that_fails_ends_the_run_after_a_checkpoint(make_world: MakeWorld) -> None:
    world = world_of(make_world, rl={"gate": {"evaluation": "held-out", "value": "1.5"}})
    with pytest.raises(ExceptionGroup) as caught:
        await world.train()
    error = root_cause(caught.value)
    assert isinstance(error, GateNotMetError)
    assert "phases[].gate of rl: Success of held-out must be AtLeast 1.5, and is" in str(error)
    assert any("000000000010/manifest.json" in key for key in world.store.objects)


async def test_a_gate_may_only_complain(make_world: MakeWorld, uninterrupted: str) -> None:
    gate = {"evaluation": "held-out", "value": "1.5", "onFail": "Continue"}
    world = world_of(make_world, rl={"gate": gate})
    assert await world.train()
    assert world.digest == uninterrupted
    assert events(world).count("GateNotMet") == 1


async def test_a_run_that_its_gate_suspends_goes_on_once_the_gate_is_changed(
    make_world: MakeWorld, uninterrupted: str
) -> None:
    gate = {"evaluation": "held-out", "value": "1.5", "onFail": "Suspend"}
    world = world_of(make_world, rl={"gate": gate})
    for _ in range(2):  # unchanged, it is suspended again, and nothing is measured again
        assert not await world.train()
        assert world.runs[-1].reporter.status.reason == "GateNotMet"
    assert len(world.rows("eval")) == 3
    world.spec["phases"][1]["gate"]["value"] = "0"

    def prepare(run: Run) -> None:
        assert isinstance(run.learners, SimulatedLearners)
        run.learners.steps_until_crash = 0  # no step is left

    assert await world.train(prepare)
    assert world.digest == uninterrupted


def told(run: Run) -> list[tuple[str, int, bool, str]]:
    found = run.reporter.status.phases
    return [(each.name, each.step, each.is_done, each.gate) for each in found]


async def test_the_status_says_how_far_each_phase_is_and_what_became_of_its_gate(
    make_world: MakeWorld,
) -> None:
    target = {"metric": "Loss", "op": "AtMost", "value": "9", "windowSteps": 2}
    gate = {"evaluation": "held-out", "op": "AtLeast", "value": "2", "onFail": "Continue"}
    world = world_of(make_world, sft={"successPolicy": target}, rl={"gate": gate})
    await world.crash(after=3)
    assert told(world.runs[0]) == [("sft", 2, True, ""), ("rl", 1, False, "")]
    assert await world.train()
    assert told(world.runs[-1]) == [("sft", 2, True, ""), ("rl", RL_STEPS, True, "NotMet")]
