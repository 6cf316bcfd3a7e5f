"""`etude eval`: figures of a finished evaluation from the real local runtime, and refusals."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.support import warm_etude

MANIFEST = """
apiVersion: etude.dev/v1alpha1
kind: EvalRun
metadata: {name: held-out}
spec:
  checkpointRef: {name: demo-s00000010-000000}
  suites: [{name: held-out, uri: "s3://inputs/held-out", environment: repos}]
  environments: [{name: repos, poolRef: {name: shared}, template: python}]
"""
RUN = {
    "model": {"uri": "s3://inputs/model"},
    "storage": {"uri": "s3://runs/demo"},
    "phases": [
        {
            "name": "sft",
            "type": "SupervisedFineTuning",
            "maxSteps": 10,
            "optimizer": {"learningRate": "1e-3"},
            "data": [{"name": "traces", "uri": "s3://inputs/traces.jsonl"}],
        }
    ],
    "roles": {"trainer": {}},
}
STATUS = {
    "policy": "1.31",
    "manifestDigest": "0322fffa14a5" + "0" * 52,
    "results": {"uri": "file:///runs/demo/evaluations/held-out-1"},
    "suites": [
        {
            "name": "held-out",
            "tasks": 12,
            "samples": 23,
            "lost": 1,
            "mean": "0.8333",
            "bestOf": "1.0000",
            "bestOfSamples": 2,
            "sentence": "refused: success worse by 4.1 points",
        }
    ],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run.yaml").touch()
    (tmp_path / "evalrun.yaml").write_text(MANIFEST)
    return tmp_path


def _object(kind: str, name: str, spec: Any, **status: Any) -> dict[str, Any]:
    over = {"type": "Complete", "status": "True", "reason": "R", "observedGeneration": 1}
    return {
        "apiVersion": "etude.dev/v1alpha1",
        "kind": kind,
        "metadata": {"name": name, "namespace": "default", "uid": f"uid-{name}", "generation": 1},
        "spec": spec,
        "status": {"conditions": [over], "phase": "Complete", **status},
    }


def _write_finished(folder: Path, **status: Any) -> None:
    evaluation = {
        "checkpointRef": {"name": "demo-s00000010-000000"},
        "suites": [
            {
                "name": "held-out",
                "uri": f"file://{folder}/inputs/inputs/held-out",
                "environment": "repos",
            }
        ],
        "environments": [{"name": "repos", "poolRef": {"name": "shared"}, "template": "python"}],
    }
    run = _object("RLRun", "demo", RUN)
    known = [run, _object("EvalRun", "held-out", evaluation, **STATUS, **status)]
    (folder / "objects.json").write_text(json.dumps(known))


def _evaluate(folder: Path, *options: str) -> tuple[int, str]:
    done = warm_etude.etude("eval", str(folder / "evalrun.yaml"), str(folder), *options)
    return done.returncode, done.stdout + done.stderr


def test_a_finished_evaluation_is_shown_and_not_run_again(folder: Path) -> None:
    _write_finished(folder, verdict="Refused")
    code, shown = _evaluate(folder)
    assert code == 1, shown
    assert "held-out: mean 0.8333, best of 2 1.0000, 23 rollouts of 12 tasks, 1 lost" in shown
    assert "refused: success worse by 4.1 points" in shown
    assert "version 1.31, manifest 0322fffa14a5" in shown


def test_a_folder_without_a_run_is_refused_in_the_runtimes_words(folder: Path) -> None:
    code, shown = _evaluate(folder)
    assert code == 4, shown
    assert "holds no run to evaluate" in shown


def test_a_file_without_an_evaluation_is_refused(folder: Path) -> None:
    (folder / "evalrun.yaml").write_text(MANIFEST.replace("EvalRun", "RLRun"))
    code, shown = _evaluate(folder)
    assert code == 4
    assert "holds no EvalRun with a usable metadata.name" in shown
