"""`etude plan` as a user types it."""

import json
from pathlib import Path

import pytest
from tests.support.warm_etude import etude

LIMIT_S = 600.0
"""A plan loads torch, in a process of its own."""
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 2_048,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 384,
    "max_position_embeddings": 1_024,
}
MANIFEST = """
apiVersion: etude.dev/v1alpha1
kind: RLRun
metadata: {name: small}
spec:
  model: {uri: "file:///not/on/this/machine"}
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
def manifest(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(MANIFEST)
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPE))
    return folder


def test_a_phase_that_does_not_fit_says_what_each_change_saves(manifest: Path, model: Path) -> None:
    # No GPU is so small: the limits are, to keep the model small; few changes are left to plan.
    small = "learnerRanks: 2, memory: 1Mi, nodeSelector: {nvidia.com/gpu.memory: '8'}"
    settings = "activationCheckpointing: Blocks, packing: Padded"
    text = MANIFEST.replace("learnerRanks: 2", f"{small}, {settings}")
    manifest.write_text(text.replace('"1e-3"', '"1e-3", moments: BFloat16'))
    done = etude("plan", str(manifest), "--model", str(model), limit_s=LIMIT_S)
    assert done.returncode == 1, done.stderr
    assert "phase sft: 2 ranks, passes of 512 tokens on a GPU" in done.stdout
    for part in ("weights", "gradients", "moments", "gathered", "activations", "temporaries"):
        assert part in done.stdout
    assert "does not fit into 0.0 GiB, 90% of 0 GiB" in done.stdout
    assert "for the 2 ranks of a pod: does not fit into 0.0 GiB" in done.stdout
    assert "roles.trainer.learnerRanks: 4, roles.trainer.gpusPerReplica: 4: 0." in done.stdout


@pytest.mark.long
def test_a_plan_as_json_says_whether_rank_and_pod_fit(manifest: Path, model: Path) -> None:
    manifest.write_text(MANIFEST.replace("learnerRanks: 2", "learnerRanks: 2, memory: 1Gi"))
    done = etude("plan", str(manifest), "--model", str(model), "--json", limit_s=LIMIT_S)
    assert done.returncode == 0, done.stderr
    (phase,) = map(json.loads, done.stdout.splitlines())
    assert phase["fits"]
    assert phase["changes"] == []
    assert (phase["limitGib"], phase["podLimitGib"]) == (0.9 * 80, 0.9)


def test_what_cannot_be_planned_is_refused_with_a_fix(manifest: Path, model: Path) -> None:
    missing = etude("plan", str(manifest))
    assert missing.returncode == 4
    assert "/not/on/this/machine" in missing.stderr
    manifest.write_text(MANIFEST.replace("maxSteps: 1", "maxSteps: 0"))
    wrong = etude("plan", str(manifest), "--model", str(model))
    assert wrong.returncode == 4
    assert "maxSteps" in wrong.stderr
    manifest.write_text("kind: ConfigMap\napiVersion: v1\nmetadata: {name: other}\n")
    other = etude("plan", str(manifest))
    assert other.returncode == 4
    assert "holds 0 objects of kind RLRun" in other.stderr
    for done in (missing, wrong, other):
        assert "Traceback" not in done.stderr
