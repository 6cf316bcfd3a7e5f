"""Progress of an evaluation: sizes first, then what is done and the time that is left."""

import json
from pathlib import Path

import pytest
import torch
from tests.support.trainer_simulation.chat import save_byte_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from etude.cli.verbs.model import app
from etude.trainer.base_evaluation.progress import EvaluationProgress


def test_the_time_that_is_left_follows_from_the_tokens_of_all_measures() -> None:
    now_s = 100.0
    rows: list[dict[str, object]] = []
    progress = EvaluationProgress(num_tokens=1_000, write=rows.append, clock=lambda: now_s)
    report = progress.follow("windows of text")
    now_s = 101.0
    report(1, 4, 100)
    assert rows == [], "every few seconds"
    now_s = 104.0
    report(2, 4, 200)
    assert rows.pop() == {
        "progress": "windows of text",
        "done": 2,
        "of": 4,
        "share": 0.2,
        "left_s": 16,
    }
    report(4, 4, 400)
    report = progress.follow("questions")
    now_s = 112.0
    report(1, 2, 350)
    assert (rows[0]["share"], rows[0]["left_s"]) == (0.75, 4)


def test_the_command_says_sizes_and_the_accuracy_of_a_guess(tmp_path: Path) -> None:
    torch.manual_seed(1)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512}
    LlamaForCausalLM(LlamaConfig(vocab_size=300, **shape, **heads)).save_pretrained(tmp_path / "m")
    save_byte_tokenizer(tmp_path / "m")
    (tmp_path / "text.py").write_text("x = 1\n" * 50)
    (tmp_path / "asked.jsonl").write_text(
        json.dumps({"question": "Which?", "choices": ["one", "two"], "answer": 1})
    )
    arguments = ["evaluate", str(tmp_path / "m"), "--programs", "1", "--context", "128"]
    arguments += ["--text", str(tmp_path / "text.py"), "--questions", str(tmp_path / "asked.jsonl")]
    shown = CliRunner().invoke(app, arguments, env={"COLUMNS": "120"})
    assert shown.exit_code == 0, shown.output
    for words in (
        "parameters on cpu, ",
        "tokens to score",
        "bits per byte",
        "questions (chance 50 %)",
        "state after 32 statements (chance 20 %)",
    ):
        assert words in shown.output


@pytest.mark.parametrize("option", ["--text", "--questions"])
def test_a_path_that_is_wrong_is_named_before_a_model_is_loaded(
    tmp_path: Path, option: str
) -> None:
    arguments = ["evaluate", str(tmp_path / "absent"), option, str(tmp_path / "nothing")]
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 4
    assert "nothing does not exist" in " ".join(shown.output.split())
