"""Trains the encoder that code search may use, and writes it where it is found.

    make search-model                      # runs/search-model/trained-….npz
    python -m search_bench.train --out runs/search-model --seed 0

The corpus is the Python code at hand: standard library and locked packages under permissive
licences, without those that `bench/search.py` judges by. The same packages, seed, threads and
processor give the same encoder, and the name says which one it is.
"""

import argparse
import itertools
import random
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from etude.agent.search.embedders.registry import encoder_path
from etude.agent.search.embedders.trained import TrainedEmbedder
from search_bench import corpus, lessons, questions, training
from search_bench.corpus import File
from search_bench.lessons import Lesson, Texts
from search_bench.training import Recipe

OUT = Path("runs/search-model")
MAX_PER_PACKAGE = 2_000
MAX_PACKAGE_BYTES = 2_000_000
"""Lessons and files of a package, so that no package's own words make the encoder."""


def read_lessons(seed: int) -> tuple[list[Lesson], Texts]:
    """Read the lessons of all packages that nothing is judged by."""
    refused = {a.question for file in corpus.held_out_files() for a in questions.answers(file)}
    texts, found = Texts(), list[Lesson]()
    for _, files in itertools.groupby(corpus.training_files(), key=lambda file: file.package):
        package = sample(list(files), seed)
        answers = (answer for file in package for answer in questions.answers(file))
        chosen = lessons.choose(answers, refused, MAX_PER_PACKAGE, seed)
        refused.update(answer.question for answer in chosen)
        found += lessons.add_lessons(package, chosen, texts)
    return found, texts


def sample(files: Sequence[File], seed: int) -> list[File]:
    """Choose files of a package at random, up to the limit."""
    order = list(files)
    random.Random(seed).shuffle(order)  # noqa: S311 - a sample, no secret
    sizes = itertools.accumulate(len(file.text) for file in order)
    return [file for file, size in zip(order, sizes, strict=True) if size <= MAX_PACKAGE_BYTES]


def report(line: str) -> None:
    """Print a line with the CPU time so far."""
    print(f"{line}, {time.process_time():.0f} CPU-s", flush=True)


def main(given: Sequence[str] | None = None) -> None:
    """Read the corpus, train, write the encoder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args(given)
    torch.set_num_threads(options.threads)
    learned, texts = read_lessons(options.seed)
    report(f"{len(learned)} lessons, {len(texts)} texts")
    weights = training.train(learned, texts, Recipe(seed=options.seed), report)
    made = TrainedEmbedder.of(weights)
    options.out.mkdir(parents=True, exist_ok=True)
    path = encoder_path(made.id, options.out)
    made.save(path)
    report(f"{path}: {len(weights.words)} words, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
