"""What a manifest means on one machine."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from etude.common.errors import UserError
from etude.operator.local import run_folder
from etude.operator.local import runtime as local
from etude.operator.local.localize import (
    apply_settings,
    input_folder,
    localize,
    localize_evaluation,
)

FOLDER = Path("/runs/demo")


def test_the_store_is_the_run_folder_and_buckets_lie_below_it(run_body: Any) -> None:
    spec: Any = localize(run_body(), FOLDER)["spec"]
    assert spec["storage"]["uri"] == "file:///runs/demo"
    assert spec["model"]["uri"] == "file:///runs/demo/inputs/inputs/model"
    tasks = spec["phases"][1]["tasks"][0]
    assert tasks["uri"] == "file:///runs/demo/inputs/inputs/tasks"
    assert input_folder("s3://inputs/tasks", FOLDER) == FOLDER / "inputs/inputs/tasks"


def test_a_store_with_an_endpoint_can_be_reached_and_stays(run_body: Any) -> None:
    storage = {"uri": "s3://runs/demo", "endpoint": "http://localhost:9000"}
    body = run_body(storage=storage)
    assert localize(body, FOLDER) == body


def test_what_goes_after_the_end_of_a_run_stays_on_the_users_machine(
    run_body: Any, tmp_path: Path
) -> None:
    rules = [{"after": "Failed", "policy": "DeleteSelf"}]
    for fields in ({"ttlSecondsAfterFinished": 0}, {"deletionRules": rules}):
        local = localize(run_body(**fields), tmp_path)
        assert local == localize(run_body(), tmp_path)


def test_a_run_of_another_manager_is_refused_on_one_machine(run_body: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="managedBy"):
        localize(run_body(managedBy="other.dev/them"), tmp_path)


def test_folders_that_are_named_as_such_stay(run_body: Any) -> None:
    spec: Any = localize(run_body(model={"uri": "file:///models/a"}), FOLDER)["spec"]
    assert spec["model"]["uri"] == "file:///models/a"


def test_fields_are_set_by_name_by_index_and_where_nothing_was(run_body: Any) -> None:
    changed: Any = apply_settings(
        run_body(),
        [
            "spec.phases[rl].maxSteps=3",
            "spec.phases.0.maxSteps=2",
            "spec.phases[sft].optimizer.learningRate=1e-2",
            "spec.checkpointing.everySteps=5",
            "spec.suspend=true",
        ],
    )
    spec = changed["spec"]
    assert [phase["maxSteps"] for phase in spec["phases"]] == [2, 3]
    assert spec["phases"][0]["optimizer"]["learningRate"] == "1e-2"
    assert spec["checkpointing"] == {"everySteps": 5}
    assert spec["suspend"] is True


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("spec.suspend", "is not an assignment"),
        ("=3", "is not an assignment"),
        ("spec.phases[dpo].maxSteps=3", "has no item dpo"),
        ("spec.phases.7.maxSteps=3", "has no item 7"),
        ("spec.model.uri.scheme=3", "has no field scheme"),
        ("spec.suspend={", "--set spec.suspend={"),
    ],
)
def test_a_setting_that_leads_nowhere_is_refused(run_body: Any, setting: str, words: str) -> None:
    with pytest.raises(UserError) as refused:
        apply_settings(run_body(), [setting])
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("kind: [", "InvalidYaml"),
        ("apiVersion: v1\nkind: Pod\nmetadata: {name: a}\n", "exactly one RLRun"),
    ],
)
def test_a_file_without_one_run_is_refused(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(UserError) as refused:
        local.read_manifests(file, [])
    assert words in str(refused.value)


def status(**conditions: str) -> dict[str, Any]:
    return {
        "conditions": [
            {"type": kind, "status": value, "observedGeneration": 2, "reason": "R"}
            for kind, value in conditions.items()
        ]
    }


def test_an_outcome_counts_for_the_present_generation_only() -> None:
    run = {"metadata": {"generation": 2}, "status": status(Suspended="True")}
    assert run_folder.run_outcome(run) == "Suspended"
    assert run_folder.run_outcome({**run, "metadata": {"generation": 3}}) is None


def test_a_run_that_failed_is_tried_again_from_what_it_was(tmp_path: Path, run_body: Any) -> None:
    body = run_body()
    body["status"] = {
        **status(Failed="True"),
        "attempt": 3,
        "intent": {"type": "Fail"},
        "active": {"seconds": 10.0, "since": "2026-01-01T00:00:00Z"},
    }
    run_folder.save_objects(tmp_path, [body])
    os.utime(tmp_path / run_folder.OBJECTS, (1_767_225_700, 1_767_225_700))
    [found] = run_folder.load_objects(tmp_path)
    assert found["status"] == {"attempt": 3, "active": {"seconds": 110.0}}


def test_a_complete_run_stays_complete(tmp_path: Path, run_body: Any) -> None:
    body = {**run_body(), "status": status(Complete="True")}
    run_folder.save_objects(tmp_path, [body, {"kind": "Pod"}])
    assert run_folder.load_objects(tmp_path) == [body]
    assert json.loads((tmp_path / run_folder.OBJECTS).read_text()) == [body]


EVALUATION = """
apiVersion: etude.dev/v1alpha1
kind: EvalRun
metadata: {name: held-out}
spec:
  checkpointRef: {name: demo-s00000010-000000}
  suites: [{name: held-out, uri: "s3://inputs/held-out", environment: repos}]
  environments: [{name: repos, poolRef: {name: shared}, template: python}]
"""


def test_suites_lie_where_the_inputs_of_their_run_lie(run_body: Any, tmp_path: Path) -> None:
    file = tmp_path / "evalrun.yaml"
    file.write_text(EVALUATION)
    (evaluation,) = local.read_manifests(file, ["spec.samples=3"])
    run = localize(run_body(), FOLDER)
    spec: Any = localize_evaluation(evaluation, run, FOLDER)["spec"]
    assert spec["suites"][0]["uri"] == "file:///runs/demo/inputs/inputs/held-out"
    assert spec["samples"] == 3
    storage = {"uri": "s3://runs/demo", "endpoint": "http://localhost:9000"}
    assert localize_evaluation(evaluation, run_body(storage=storage), FOLDER) == evaluation


def test_a_file_with_a_run_and_an_evaluation_is_refused(run_body: Any, tmp_path: Path) -> None:
    file = tmp_path / "both.yaml"
    body = run_body()
    body["metadata"] = {"name": "demo"}
    file.write_text(f"{EVALUATION}---\n{json.dumps(body)}\n")
    with pytest.raises(UserError, match="exactly one RLRun or EvalRun"):
        local.read_manifests(file, [])
