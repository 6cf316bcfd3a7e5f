"""`python -m etude.trainer.commands.evaluate_base FOLDER`: figures by which a base is chosen."""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from etude.agent.chat.vocabulary import Vocabulary
from etude.common.errors import EtudeError
from etude.trainer.base_evaluation.questions import measure_choices, read_questions
from etude.trainer.base_evaluation.scoring import ModelScorer
from etude.trainer.base_evaluation.state_tracking import LENGTHS, measure_tracking
from etude.trainer.base_evaluation.texts import measure_texts, read_texts
from etude.trainer.model.fsdp import RankGroup
from etude.trainer.model.policy import load_policy

REPORT_EVERY_S = 2.0


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
    """Write one line of JSON for each measure, as soon as it is known, and for progress."""
    scorer = load_scorer(given.folder, context=given.context)
    if given.text is not None:
        texts = read_texts(given.text, limit_bytes=given.text_kib << 10)
        figures = measure_texts(scorer, texts, report=ProgressReport("windows of text"))
        _write({"measure": "text", **figures.to_json()})
    if given.questions is not None:
        questions = read_questions(given.questions)
        found = measure_choices(scorer, questions, report=ProgressReport("questions"))
        _write({"measure": "questions", **found.to_json()})
    for length in LENGTHS:
        report = ProgressReport(f"programs of {length} statements")
        found = measure_tracking(
            scorer, length, count=given.programs, seed=given.seed, report=report
        )
        _write({"measure": "tracking", "statements": length, **found.to_json()})


@dataclass(slots=True)
class ProgressReport:
    """Writes a line of JSON on progress, every few seconds."""

    what: str
    _written_s: float = field(default_factory=time.monotonic)

    def __call__(self, done: int, total: int) -> None:
        if time.monotonic() - self._written_s >= REPORT_EVERY_S:
            self._written_s = time.monotonic()
            _write({"progress": self.what, "done": done, "of": total})


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
