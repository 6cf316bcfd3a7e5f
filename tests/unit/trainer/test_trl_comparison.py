"""The comparison with TRL: one workload for both sides, figures beside those of other benches."""

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def bench_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder whose tokenizer makes a token of each word."""
    tokenizer = Tokenizer(models.WordLevel({"word": 0}, unk_token="word"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def report(tokens: int, cpu_s: float) -> dict[str, Any]:
    usage = {"tokens": tokens, "cpu_s": cpu_s, "wall_s": cpu_s / 2}
    return {"rollout": usage, "train": usage, "operators": {"aten::mm": 3.0, "aten::add": 1.0}}


def test_a_seed_gives_the_same_steps_and_lengths_that_engine_and_trainer_take(
    model: Path,
) -> None:
    workload = importlib.import_module("learner_bench.workload")
    first, again = (workload.draw_steps(model, steps=3, seed=5) for _ in range(2))
    assert first == again != workload.draw_steps(model, steps=3, seed=6)
    prompts = [prompt for step in first for prompt in step.prompts]
    assert len(set(prompts)) == len(prompts)
    for step in first:
        lengths = np.array(step.lengths)
        assert lengths.size == workload.PROMPTS * workload.SIBLINGS
        assert workload.LEAST_TOKENS <= lengths.min() < lengths.max() <= workload.MOST_TOKENS


def test_what_a_side_reads_is_what_was_written(tmp_path: Path, model: Path) -> None:
    workload = importlib.import_module("learner_bench.workload")
    steps = workload.draw_steps(model, steps=1, seed=0, spread=0.0)
    assert len(set(steps[0].lengths)) == 1
    written = workload.Workload(model=str(model), threads=2, steps=steps)
    written.write(tmp_path / "workload.json")
    assert workload.Workload.read(tmp_path / "workload.json") == written


def test_ratios_are_of_all_tokens_by_all_seconds() -> None:
    comparison = importlib.import_module("trl_comparison")
    ours = comparison.Side(None, [report(100, 1.0), report(300, 1.0)], report(1, 1.0))
    theirs = comparison.Side(None, [report(100, 2.0), report(300, 6.0)], report(1, 1.0))
    figures = comparison.summarise({"Etude": ours, "TRL": theirs})
    assert figures["train_tokens_per_cpu_s"] == 200
    assert figures["train_tokens_per_cpu_s_vs_trl"] == 4
    assert figures["rollout_tokens_per_s_vs_trl"] == 4
    assert figures["train_matmul_share"] == 0.75


def test_figures_of_other_benches_stay_in_the_file(tmp_path: Path) -> None:
    figures = importlib.import_module("learner_bench.figures")
    path = tmp_path / "out" / "learner.json"
    figures.merge_figures({"head_bytes_per_token": 2.0, "full_gathers": 0}, path)
    figures.merge_figures({"full_gathers": 1}, path)
    assert json.loads(path.read_text()) == {"head_bytes_per_token": 2.0, "full_gathers": 1}
