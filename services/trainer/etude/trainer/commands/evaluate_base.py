"""`python -m etude.trainer.commands.evaluate_base FOLDER`: figures by which a base is chosen."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from etude.agent.chat.vocabulary import Vocabulary
from etude.common.errors import EtudeError
from etude.trainer.base_evaluation.questions import measure_choices, read_questions
from etude.trainer.base_evaluation.scoring import ModelScorer
from etude.trainer.base_evaluation.state_tracking import measure_tracking
from etude.trainer.base_evaluation.texts import measure_texts, read_texts
from etude.trainer.model.fsdp import RankGroup
from etude.trainer.model.policy import load_policy


def load_scorer(folder: Path, *, context: int) -> ModelScorer:
    """Load a model, on a GPU if there is one; its weights must be there.

    Raises:
        UserError: the folder holds no model, or no weights.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    policy = load_policy(folder, seed=0, ranks=RankGroup(rank=0, size=1, device=device))
    positions = policy.config.get_text_config().max_position_embeddings
    return ModelScorer(policy, Vocabulary.load(folder), min(context, positions))


def evaluate_model(given: argparse.Namespace) -> None:
    """Write one line of JSON for each measure, as soon as it is known."""
    scorer = load_scorer(given.folder, context=given.context)
    if given.text is not None:
        texts = read_texts(given.text, limit_bytes=given.text_kib << 10)
        _write({"measure": "text", **measure_texts(scorer, texts).to_json()})
    if given.questions is not None:
        questions = read_questions(given.questions)
        _write({"measure": "questions", **measure_choices(scorer, questions).to_json()})
    tracking = measure_tracking(scorer, count=given.programs, seed=given.seed)
    for length, figures in tracking.items():
        _write({"measure": "tracking", "statements": length, **figures.to_json()})


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
