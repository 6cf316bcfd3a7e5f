"""`etude eval`: figures of a finished evaluation, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from etude.cli.main import app
from etude.cli.verbs import evaluate
from etude.common.errors import UserError

MANIFEST = """
apiVersion: etude.dev/v1alpha1
kind: EvalRun
metadata: {name: held-out}
spec:
  checkpointRef: {name: demo-s00000010-000000}
  suites: [{name: held-out, uri: "s3://inputs/held-out", environment: repos}]
  environments: [{name: repos, poolRef: {name: shared}, template: python}]
"""


class Runtime:
    """A runtime that has ended with an exit code, after it wrote the folder's objects."""

    def __init__(self, code: int) -> None:
        self.process = self
        self.code = code

    def wait(self) -> int:
        return self.code

    def read_log_end(self) -> str:
        return "    the folder holds no run"


@pytest.fixture
def evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the verb on a folder whose runtime wrote a status."""
    (tmp_path / "run.yaml").write_text("")
    file = tmp_path / "evalrun.yaml"
    file.write_text(MANIFEST)

    def make(code: int = 0, *options: str, **status: Any) -> int:
        body = {"kind": "EvalRun", "metadata": {"name": "held-out"}, "status": status}
        (tmp_path / "objects.json").write_text(json.dumps([body]))
        monkeypatch.setattr(evaluate.runs, "start_runtime", lambda *_: Runtime(code))
        try:
            app(["eval", str(file), str(tmp_path), *options], standalone_mode=False)
        except SystemExit as ended:
            return int(ended.code or 0)
        return 0

    return make


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


def test_figures_and_the_verdict_are_shown(
    evaluated: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluated(**STATUS) == 0
    shown = capsys.readouterr().out
    assert "held-out: mean 0.8333, best of 2 1.0000, 23 rollouts of 12 tasks, 1 lost" in shown
    assert "refused: success worse by 4.1 points" in shown
    assert "version 1.31, manifest 0322fffa14a5" in shown


@pytest.mark.parametrize(("verdict", "code"), [("Passed", 0), ("Refused", 1), ("NotEnoughData", 1)])
def test_a_candidate_that_does_not_pass_is_a_no(evaluated: Any, verdict: str, code: int) -> None:
    assert evaluated(0, "--json", verdict=verdict, **STATUS) == code


def test_an_evaluation_that_has_no_result_shows_the_log(
    evaluated: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluated(4) == 4
    assert "holds no run" in capsys.readouterr().out


def test_a_file_without_an_evaluation_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("")
    (tmp_path / "other.yaml").write_text(MANIFEST.replace("EvalRun", "RLRun"))
    with pytest.raises(UserError, match="holds no EvalRun"):
        app(["eval", str(tmp_path / "other.yaml"), str(tmp_path)], standalone_mode=False)
