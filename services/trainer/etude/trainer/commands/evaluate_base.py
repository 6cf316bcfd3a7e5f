"""`python -m etude.trainer.commands.evaluate_base FOLDER`: figures by which a base is chosen."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from etude.agent.chat.vocabulary import Vocabulary
from etude.common.errors import EtudeError
from etude.trainer.base_evaluation.progress import EvaluationProgress
from etude.trainer.base_evaluation.questions import (
    count_question_tokens,
    encode_questions,
    measure_choices,
    read_questions,
)
from etude.trainer.base_evaluation.scoring import ModelScorer
from etude.trainer.base_evaluation.state_tracking import LENGTHS, PROGRAM, make_programs
from etude.trainer.base_evaluation.texts import cut_windows, measure_texts, read_texts
from etude.trainer.model.fsdp import RankGroup
from etude.trainer.model.policy import load_policy

GPU_TOKENS = 8_192
"""Tokens of one forward pass."""
CPU_TOKENS = 2_048
"""A CPU is busy with these for seconds, and with more it is no faster: progress is said between."""


def load_scorer(folder: Path, *, context: int) -> ModelScorer:
    """Load a model, on a GPU if there is one; its weights must be there.

    Raises:
        UserError: the folder holds no model, or no weights.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    policy = load_policy(folder, seed=0, ranks=RankGroup(rank=0, size=1, device=device))
    positions = policy.config.get_text_config().max_position_embeddings
    batch_tokens = GPU_TOKENS if device.type == "cuda" else CPU_TOKENS
    return ModelScorer(policy, Vocabulary.load(folder), min(context, positions), batch_tokens)


def evaluate_model(given: argparse.Namespace) -> None:
    """Write one line of JSON for each measure, as soon as it is known, and for progress."""
    texts = read_texts(given.text, limit_bytes=given.text_kib << 10) if given.text else []
    questions = read_questions(given.questions) if given.questions else []
    scorer = load_scorer(given.folder, context=given.context)
    programs = {
        length: make_programs(length, count=given.programs, seed=given.seed) for length in LENGTHS
    }
    size = sum(len(window.token_ids) for window in cut_windows(scorer, texts))
    size += count_question_tokens(encode_questions(scorer, questions))
    for each in programs.values():
        size += count_question_tokens(encode_questions(scorer, each, template=PROGRAM))
    _write({"tokens": size, **describe_model(scorer)})
    progress = EvaluationProgress(num_tokens=size, write=_write)
    if texts:
        figures = measure_texts(scorer, texts, report=progress.follow("windows of text"))
        _write({"measure": "text", **figures.to_json()})
    if questions:
        found = measure_choices(scorer, questions, report=progress.follow("questions"))
        _write({"measure": "questions", **found.to_json()})
    for length, each in programs.items():
        report = progress.follow(f"programs of {length} statements")
        found = measure_choices(scorer, each, template=PROGRAM, report=report)
        _write({"measure": "tracking", "statements": length, **found.to_json()})


def describe_model(scorer: ModelScorer) -> dict[str, object]:
    """Size of a model, and the device that evaluates it."""
    weights = list(scorer.policy.parameters())
    return {"parameters": sum(each.numel() for each in weights), "device": weights[0].device.type}


def _write(row: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(row) + "\n")
    sys.stdout.flush()


def main(arguments: Sequence[str]) -> int:
    """Evaluate one model; 0, or 4 for what cannot be evaluated."""
    parser = argparse.ArgumentParser(prog="python -m etude.trainer.commands.evaluate_base")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--text-kib", type=int, default=256)
    parser.add_argument("--questions", type=Path)
    parser.add_argument("--programs", type=int, default=40)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=0)
    try:
        evaluate_model(parser.parse_args(arguments))
    except (EtudeError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 4
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
