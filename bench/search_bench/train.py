"""Trains the table of word vectors that code search may use, and writes it where it is found.

    make search-model                      # runs/search-model/trained-….npz, two minutes of CPU
    python -m search_bench.train --out runs/search-model --seed 0

The corpus is the Python code at hand: standard library and locked packages under permissive
licences, without those that `bench/search.py` judges by. The same packages, seed and processor give
the same table, and the name says which table it is.
"""

import argparse
import random
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from etude.agent.search.embedders.registry import table_path
from etude.agent.search.embedders.trained import TrainedEmbedder
from search_bench import corpus, questions, training
from search_bench.questions import Answer
from search_bench.training import Pair, Recipe

OUT = Path("runs/search-model")
MAX_PER_PACKAGE = 4_000
"""So that no package's own words make the table."""


def chosen(found: Iterable[Answer], refused: set[str], seed: int) -> Iterator[Answer]:
    """Questions that are asked once and are none of the test's, so many of each package."""
    by_package: dict[str, list[Answer]] = {}
    for answer in found:
        by_package.setdefault(answer.package, []).append(answer)
    known = set(refused)
    for package in sorted(by_package):
        answers = by_package[package]
        random.Random(seed).shuffle(answers)  # noqa: S311 - a sample, no secret
        left = MAX_PER_PACKAGE
        for answer in answers:
            if left and answer.question not in known:
                known.add(answer.question)
                left -= 1
                yield answer


def pair(answer: Answer) -> Pair:
    """What is learnt from one answer. Pairs of names and code besides made the table worse."""
    return training.pair(answer.question, f"{answer.path.rpartition('/')[2]}\n{answer.code}")


def main() -> None:
    """Read the corpus, train, write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)  # sums of several threads come in any order
    refused = {a.question for file in corpus.held_out_files() for a in questions.answers(file)}
    found = (a for file in corpus.training_files() for a in questions.answers(file))
    learnt = [pair(answer) for answer in chosen(found, refused, given.seed)]
    print(f"{len(learnt)} pairs, {time.process_time():.0f} CPU-s", flush=True)

    def tell(loss: float) -> None:
        print(f"loss {loss:.4f}, {time.process_time():.0f} CPU-s", flush=True)

    table = training.train(learnt, Recipe(seed=given.seed), tell)
    made = TrainedEmbedder.quantise_rows(table.words, table.rows)
    given.out.mkdir(parents=True, exist_ok=True)
    path = table_path(made.id, given.out)
    made.save(path)
    print(f"{path}: {len(made.ids)} words, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
