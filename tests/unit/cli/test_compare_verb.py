"""`etude compare`: recorded evaluations against each other, and its exit codes."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.support import warm_etude

from etude.common.run_folder.record import FolderRecord

NUM_TASKS = 120


def _rows(solved: int, *, seconds: float = 3.0) -> list[Mapping[str, object]]:
    rows: list[Mapping[str, object]] = [
        {
            "task_id": f"held-out/{number}",
            "reward": float(number < solved),
            "success": float(number < solved),
            "seconds": seconds + number % 7,
        }
        for number in range(NUM_TASKS)
    ]
    return [*rows, {"task_id": "held-out/lost", "fault": "no slot"}]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run.yaml").touch()
    record = FolderRecord(tmp_path)
    record.write_rollouts(0, "eval-held-out", _rows(60))
    record.write_rollouts(20, "eval-held-out", _rows(90, seconds=9.0))
    record.write_rollouts(40, "eval-held-out", _rows(20))
    return tmp_path


def _compare(*words: str) -> tuple[int, str, str]:
    done = warm_etude.etude("compare", *words)
    return done.returncode, done.stdout, done.stderr


def test_a_better_policy_passes(run: Path) -> None:
    code, _, said = _compare(f"{run}@0", f"{run}@20")
    assert code == 0, said
    assert said.startswith("passed: success better by 25.0 points, lower 95 % bound ")
    assert "margin -2.0 points, 120 tasks" in said


def test_a_worse_one_is_refused_and_the_newest_is_taken(run: Path) -> None:
    code, out, said = _compare(f"{run}@20", str(run), "--json")
    assert code == 1
    assert said.startswith("refused: success worse by 58.3 points")
    row = json.loads(out)
    assert row["verdict"] == "Refused"
    assert row["differences"]["success"]["num_tasks"] == NUM_TASKS


def test_a_metric_of_its_own_unit_may_refuse(run: Path) -> None:
    rules = ("--margin", "success=0.02", "--margin", "seconds=2")
    code, _, said = _compare(f"{run}@0", f"{run}@20", *rules)
    assert code == 1
    assert said.startswith("refused: seconds worse by 6, lower 95 % bound -6")


def test_what_rows_do_not_hold_was_not_measured(run: Path) -> None:
    code, _, said = _compare(f"{run}@0", f"{run}@20", "--margin", "sampled_tokens=10")
    assert (code, said) == (1, "not enough data: sampled_tokens was not measured\n")


def test_a_candidate_that_loses_the_samples_of_tasks_that_it_fails_does_not_pass(run: Path) -> None:
    record = FolderRecord(run)
    rows = _rows(90)
    lost: list[Mapping[str, object]] = [
        {"task_id": row["task_id"], "fault": "no slot"} for row in rows if row.get("reward") == 0
    ]
    record.write_rollouts(60, "eval-held-out", [*rows, *lost])
    code, _, said = _compare(f"{run}@0", f"{run}@60")
    assert code == 1
    assert said == "not enough data: success lacks 31 of 151 samples of the candidate\n"


def test_few_tasks_decide_nothing(run: Path) -> None:
    code, _, said = _compare(f"{run}@0", f"{run}@20", "--min-tasks", "500")
    assert code == 1
    assert "success has 120 tasks of both policies, 500 are needed" in said


@pytest.mark.parametrize(
    "wrong", ["success", "success=x", "success=-1", "success=nan", "speed=1", "=1"]
)
def test_a_wrong_margin_is_refused_by_name(wrong: str, run: Path) -> None:
    code, _, said = _compare(str(run), str(run), "--margin", wrong)
    assert code == 2
    assert said.startswith(f"--margin {wrong}  ")
    assert "fix: give METRIC=LOSS" in said


def test_an_evaluation_that_is_not_there_is_named(run: Path) -> None:
    code, _, said = _compare(f"{run}@7", str(run))
    assert code == 3
    assert f"{run}@7  has eval-held-out at 0, 20, 40" in said
    code, _, said = _compare(str(run), str(run), "--evaluation", "other")
    assert code == 3
    assert f"{run}  has eval-other at no step" in said
