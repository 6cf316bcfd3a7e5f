"""The process that plans memory for `etude plan`."""

import io
import json
import sys
from pathlib import Path

import pytest
import yaml

from etude.common.api.run.spec import RLRunSpec
from etude.trainer.commands import plan_memory

SHAPE = {
    "model_type": "llama",
    "vocab_size": 2_048,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 384,
    "max_position_embeddings": 1_024,
}
SPEC = """
model: {uri: "file:///model"}
storage: {uri: "s3://runs/small"}
phases:
- name: sft
  type: SupervisedFineTuning
  maxSteps: 1
  optimizer: {learningRate: "1e-3"}
  data: [{name: traces, uri: "s3://data/traces.jsonl"}]
roles:
  trainer: {gpusPerReplica: 2, learnerRanks: 2, microBatchTokens: 512}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of the model, with the spec at the standard input."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    spec = RLRunSpec.model_validate(yaml.safe_load(SPEC))
    monkeypatch.setattr(sys, "stdin", io.StringIO(spec.model_dump_json(by_alias=True)))
    monkeypatch.setattr(sys, "argv", ["plan_memory", str(tmp_path), "--limit-gib", "0.001"])
    return tmp_path


@pytest.mark.usefixtures("folder")
def test_a_row_has_rank_pod_and_changes(capsys: pytest.CaptureFixture[str]) -> None:
    plan_memory.main()
    (phase,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert (phase["device"], phase["tokens"], phase["ranksPerPod"]) == ("GPU", 512, 2)
    assert phase["peakGib"] == pytest.approx(sum(phase["parts"].values()), abs=0.01)
    changes = {change["change"]: change for change in phase["changes"]}
    ranks = changes["roles.trainer.learnerRanks: 4, roles.trainer.gpusPerReplica: 4"]
    assert ranks["peakGib"] < phase["peakGib"]
    # Twice as many ranks, each with half of the weights and moments.
    assert ranks["podGib"] == pytest.approx(phase["podGib"], abs=0.001)
    assert changes["roles.trainer.cpuOffload: true"]["podGib"] > 2 * phase["podGib"]


def test_a_model_of_an_unknown_kind_is_refused_with_a_fix(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "config.json").write_text(json.dumps(SHAPE | {"model_type": "no-such-model"}))
    with pytest.raises(SystemExit) as stopped:
        plan_memory.main()
    assert stopped.value.code == 4
    said = capsys.readouterr().err
    assert "config.json cannot be used" in said
    assert "fix: " in said
