"""What a run on one machine remembers from one start to the next."""

from pathlib import Path
from typing import Any

import pytest

from etude.common.errors import UserError
from etude.operator.local import run_folder
from etude.operator.manifests import Manifest

RESUMPTION = {"number": 2, "mode": "Best", "name": "demo-s00000020-000000", "step": 20}


def run(ending: str | None) -> Manifest:
    conditions = [] if ending is None else [{"type": ending, "status": "True", "reason": "R"}]
    status: dict[str, Any] = {
        "conditions": conditions,
        "startTime": "2026-01-01T00:00:00Z",
        "resumption": RESUMPTION,
        "active": {"seconds": 5.0},
    }
    metadata = {"name": "demo", "namespace": "default", "uid": "u"}
    return {"kind": "RLRun", "metadata": metadata, "spec": {}, "status": status}


@pytest.mark.parametrize("ending", [None, "Failed"])
def test_where_a_run_was_put_back_to_is_known_to_whoever_starts_it_again(
    tmp_path: Path, ending: str | None
) -> None:
    run_folder.save_objects(tmp_path, [run(ending)])
    (found,) = run_folder.load_objects(tmp_path)
    assert found["status"]["resumption"] == RESUMPTION
    assert found["status"]["active"] == {"seconds": 5.0}
    assert run_folder.run_outcome(found) is None


def test_another_evaluation_of_a_name_is_refused_as_its_result_would_be_the_first_ones(
    tmp_path: Path,
) -> None:
    metadata = {"name": "held-out", "namespace": "default"}
    first: Manifest = {"kind": "EvalRun", "metadata": metadata, "spec": {"samples": 2}}
    run_folder.save_objects(tmp_path, [first])
    run_folder.refuse_changed_evaluation(tmp_path, first)
    with pytest.raises(UserError, match="another spec"):
        run_folder.refuse_changed_evaluation(tmp_path, {**first, "spec": {"samples": 4}})


def test_a_run_does_not_go_on_while_its_checkpoint_is_evaluated(tmp_path: Path) -> None:
    run_folder.save_objects(tmp_path, [run("Failed")])
    assert run_folder.load_evaluated_run(tmp_path)["spec"]["suspend"] is True
    run_folder.save_objects(tmp_path, [run("Complete")])
    assert run_folder.load_evaluated_run(tmp_path) == run("Complete")


def test_a_folder_without_a_run_has_nothing_to_evaluate(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no run to evaluate"):
        run_folder.load_evaluated_run(tmp_path)
