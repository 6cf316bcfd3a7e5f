"""A run of a mixture of experts replays in the learner the experts that its engine recorded."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support import cut_demo
from transformers import AutoConfig, Qwen3MoeConfig

from etude.common.run_folder.record import FolderRecord

DEADLINE_S = 420


def mix_experts(model: Path) -> None:
    """Make the model of a folder a mixture of experts of the same vocabulary, without weights."""
    dense = AutoConfig.from_pretrained(model)
    Qwen3MoeConfig(
        vocab_size=dense.vocab_size,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=dense.max_position_embeddings,
        tie_word_embeddings=False,
        eos_token_id=dense.eos_token_id,
        architectures=["Qwen3MoeForCausalLM"],
    ).save_pretrained(model)
    for weights in model.glob("*.safetensors"):
        weights.unlink()


def run(tmp_path: Path, manifest: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    folder, file = tmp_path / "run", tmp_path / "rlrun.yaml"
    cut_demo.make_data({"folder": str(folder / "inputs" / "etude")}, tasks=16)
    mix_experts(folder / "inputs" / "etude" / "demo" / "model")
    file.write_text(json.dumps(manifest))  # JSON is YAML
    command = [sys.executable, "-c", "from etude.cli.main import main; main()", "run"]
    return subprocess.run(
        [*command, str(file), "--dir", str(folder), "--plain"],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


@pytest.mark.long
def test_a_run_trains_its_rollouts_with_the_experts_of_the_engine(tmp_path: Path) -> None:
    manifest = cut_demo.short_demo()
    manifest["spec"]["phases"][2]["routerReplay"] = {"mode": "Recorded"}

    done = run(tmp_path, manifest)

    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "run"
    rows = list(FolderRecord(folder).rows())
    steps = [row for row in rows if row["kind"] == "step" and "reward_mean" in row]
    assert [row["step"] for row in steps] == [1, 2, 3]
    for row in steps:
        assert row["extra"]["unrecorded_rollouts"] == 0
        # All but the last token of each context.
        assert 0.9 < row["extra"]["replayed_fraction"] < 1
        assert row["mismatch_max"] < 1e-4  # both compute in fp32
