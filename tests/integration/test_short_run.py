"""A short run goes from manifest to trained policy on this machine, on a real vLLM engine."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from tests.support import cut_demo
from transformers import AutoModelForCausalLM

from etude.common.run_folder.record import FolderRecord
from etude.trainer.model.policy import load_policy

DEADLINE_S = 420
"""Seven times the 57 s that it took beside other tests on two cores."""


def run_to_its_end(tmp_path: Path, manifest: dict[str, Any]) -> Path:
    """Folder of a run on this machine, over."""
    folder = tmp_path / "run"
    cut_demo.make_data({"folder": str(folder / "inputs" / "etude")}, tasks=16)
    file = tmp_path / "rlrun.yaml"
    file.write_text(json.dumps(manifest))  # JSON is YAML
    command = [sys.executable, "-c", "from etude.cli.main import main; main()", "run"]
    done = subprocess.run(
        [*command, str(file), "--dir", str(folder), "--plain"],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def short_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the short demo, over."""
    return run_to_its_end(tmp_path_factory.mktemp("short"), cut_demo.short_demo())


@pytest.mark.smoke
def test_a_short_run_trains_on_rollouts_of_the_engine_that_it_updates(short_run: Path) -> None:
    rows = list(FolderRecord(short_run).rows())
    steps = [row["step"] for row in rows if row["kind"] == "step" and "reward_mean" in row]
    assert steps == [1, 2, 3]
    assert any(row["kind"] == "eval" for row in rows)
    versions = [row for row in rows if row["kind"] == "version"]
    assert versions, "no version reached the engine"


def digests(folder: Path) -> dict[str, str]:
    """Digests of all files of a folder."""
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.long
def test_the_rubric_of_a_run_gives_its_rollouts_their_rewards_again(
    short_run: Path, tmp_path: Path
) -> None:
    rubric = tmp_path / "rlrun.yaml"
    rubric.write_text(json.dumps(cut_demo.short_demo()))
    before = digests(short_run)
    words = ["rescore", str(short_run), "--rewards", str(rubric), "--limit", "3", "--json"]
    done = subprocess.run(
        [sys.executable, "-c", "from etude.cli.main import main; main()", *words],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])["summary"]
    assert summary["scored"] > 0
    assert (summary["changed"], summary["left_out"], summary["lost"]) == (0, 0, 0)
    assert digests(short_run) == before


@pytest.mark.long
def test_a_run_of_adapters_samples_the_policy_that_it_trains(tmp_path: Path) -> None:
    manifest = cut_demo.short_demo()
    manifest["spec"]["roles"]["trainer"]["lora"] = {"rank": 8}

    folder = run_to_its_end(tmp_path, manifest)

    rows = list(FolderRecord(folder).rows())
    steps = [row for row in rows if row["kind"] == "step" and "reward_mean" in row]
    assert [row["step"] for row in steps] == [1, 2, 3]
    # Of the engine, on merged weights, and the trainer.
    assert all(0 < row["mismatch_max"] < 1e-4 for row in steps)
    final = max(folder.glob("checkpoints/*/adapter/adapter_config.json")).parents[1]
    base = load_policy(folder / "inputs" / "etude" / "demo" / "model", seed=0).model
    adapted = PeftModel.from_pretrained(base, str(final / "adapter"))
    merged = AutoModelForCausalLM.from_pretrained(final / "model")
    with torch.no_grad():
        one, other = (m(input_ids=torch.arange(64)[None]).logits for m in (adapted, merged))
    difference = one.log_softmax(-1) - other.log_softmax(-1)
    assert difference.abs().max() < 1e-4
