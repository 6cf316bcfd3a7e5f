"""Reward functions of installed packages: checked, weighted, and masked where they fail."""

import time
from pathlib import Path

import pytest
from tests.support.installed_package import install_package
from tests.unit.api.test_linter import RUN, changed
from tests.unit.rewards.test_group_scoring import Make, rewards, scorer

from etude.common.api.lint.linter import lint_text
from etude.common.api.run.roles import RewardFunction
from etude.common.errors import UserError
from etude.rewards.faults import Fault, FaultReason
from etude.rewards.rubric import RewardValue, Rubric
from etude.v1 import rollout_pb2

SOURCE = '''
import asyncio

from etude.common.api.meta import Model
from etude.rewards.functions.base import FinishedRollout, MeasuredPenalty, Penalty


class TurnsParameters(Model):
    """Turns beyond a number."""

    free: int = 3
    """Turns that cost nothing."""


def penalise_turns(rollout, parameters, success):
    if rollout.costs.turns == 99:
        raise KeyError("no such turn")
    return max(0, rollout.costs.turns - parameters.free)


async def measure_request(finished: FinishedRollout, parameters: TurnsParameters) -> float:
    await asyncio.sleep(0 if finished.record.costs.turns < 99 else 60)
    return len(finished.instruction) * finished.success


TURNS = Penalty(version="7", parameters=TurnsParameters, penalty=penalise_turns)
REQUEST = MeasuredPenalty(version="1", parameters=TurnsParameters, measure=measure_request)
NEGATIVE = Penalty(version="1", parameters=TurnsParameters, penalty=lambda *_: -1.0)
'''
ENTRIES = {
    "etude.reward_functions": {
        "acme.Turns": "acme_rewards:TURNS",
        "acme.Request": "acme_rewards:REQUEST",
        "acme.Bonus": "acme_rewards:NEGATIVE",
    }
}


@pytest.fixture(autouse=True)
def _package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "site"
    folder.mkdir()
    install_package(folder, monkeypatch, name="acme_rewards", source=SOURCE, entries=ENTRIES)


def rubric(**function: object) -> Rubric:
    rows: list[dict[str, object]] = [{"name": "tests", "function": "Verifier"}, function]
    return Rubric.from_functions([RewardFunction.model_validate(row) for row in rows])


def turns(count: int) -> rollout_pb2.Rollout:
    return rollout_pb2.Rollout(costs=rollout_pb2.Costs(turns=count))


def test_a_formula_of_a_package_is_part_of_the_sum_and_of_the_digest() -> None:
    chosen = rubric(name="turns", function="acme.Turns", weight="0.1", parameters={"free": 1})
    scored = chosen.score(turns(4), 1.0)
    assert isinstance(scored, RewardValue)
    assert scored.reward == pytest.approx(1 - 0.1 * 3)
    assert chosen.entries[1].version == "7"
    assert chosen.digest() != rubric(name="turns", function="acme.Turns", weight="0.1").digest()


@pytest.mark.parametrize(("function", "count"), [("acme.Turns", 99), ("acme.Bonus", 1)])
def test_a_formula_that_fails_masks_the_rollout(function: str, count: int) -> None:
    scored = rubric(name="part", function=function).score(turns(count), 1.0)
    assert isinstance(scored, Fault)
    assert scored.reason is FaultReason.GRADER_ERROR
    assert f"part ({function})" in scored.message


async def test_a_measurement_of_a_package_sees_the_request_and_ends_by_the_deadline(
    tmp_path: Path, task_folder: Path, rollout: Make
) -> None:
    chosen = scorer(tmp_path, {"name": "long", "function": "acme.Request", "weight": "0.001"})
    (value,) = await rewards(chosen, task_folder, rollout("x = 1\n"))
    instruction = (task_folder / "instruction.md").read_text()
    assert isinstance(value, RewardValue)
    assert value.reward == pytest.approx(1 - 0.001 * len(instruction.strip()), abs=0.002)
    slow = rollout("x = 1\n")
    slow.costs.turns = 99
    deadline_s = time.monotonic() + 0.2
    (late,) = await chosen.score(task_folder.as_uri(), "repos", [slow], deadline_s=deadline_s)
    assert isinstance(late, Fault)


@pytest.mark.parametrize(
    ("function", "parameters", "words"),
    [
        ("acme.Turns", {"fre": 1}, "acme.Turns has no such parameter"),
        ("acme.Turns", {"free": "many"}, "parameters.free"),
        ("acme.Absent", {}, "acme.Absent is not installed"),
    ],
)
def test_a_run_names_what_a_package_does_not_take(
    function: str, parameters: dict[str, object], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        rubric(name="part", function=function, parameters=parameters)


def test_lint_checks_the_parameters_of_installed_packages_and_leaves_others_to_the_service() -> (
    None
):
    def lint(function: str) -> list[str]:
        text = changed(RUN, "{name: success", f"{{name: x, {function}}}\n      - {{name: success")
        return [finding.what for finding in lint_text(text, name="run.yaml")]

    assert lint("function: acme.Turns, parameters: {free: 2}") == []
    assert lint("function: other.Turns, parameters: {free: 2}") == []
    (unknown,) = lint("function: acme.Turns, parameters: {fre: 2}")
    assert "fre is no parameter of acme.Turns" in unknown
    (misspelt,) = lint("function: Verifer")
    assert "Verifer" in misspelt
