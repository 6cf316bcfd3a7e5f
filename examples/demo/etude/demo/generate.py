"""The demo's whole input from one seed: model folder, task sets, texts, facts.

    python -m etude.demo.generate --out DIR --seed N

Written: model/{config,generation_config,tokenizer,tokenizer_config}.json, tasks/train/ID/,
tasks/held-out/ID/, data/repositories.jsonl, data/traces.jsonl, facts.json.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tokenizers import Tokenizer

from etude.agent.chat import ChatFormat
from etude.common.errors import Problem as Complaint
from etude.common.errors import UserError
from etude.demo import corpus, facts, model_folder, task_folders, tokenizer
from etude.demo.demonstrations import Demonstration
from etude.demo.problems import Problem, Source
from etude.envserver import exit_codes

MAX_PROBLEMS = 40_000
"""There are 71,680 different ones: drawing the last of them would take forever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of the generated sets."""

    train: int = 640
    """Tasks of the reinforcement-learning phase: 16 prompts for each of 40 steps."""
    held_out: int = 256
    traces: int = 8_000
    repositories: int = 600
    """Correct repositories as plain text: 12 for each of 50 steps."""

    def __post_init__(self) -> None:
        given = {
            "--train": self.train,
            "--held-out": self.held_out,
            "--traces": self.traces,
            "repositories": self.repositories,
        }
        for name, size in given.items():
            if size < 1:
                raise exit_codes.option_error(name, f"is {size}", "use a number from 1")
        total = sum(given.values())
        if total > MAX_PROBLEMS:
            raise exit_codes.option_error(
                ", ".join(given),
                f"are {total} problems together",
                f"ask for at most {MAX_PROBLEMS} in all",
            )


def generate(out: Path, *, seed: int, sizes: Sizes) -> Mapping[str, object]:
    """Make everything in a folder that does not exist yet; a pure function of seed and sizes.

    Returns:
        The content of facts.json.

    Raises:
        UserError: the folder exists and holds something.
        OSError: no folder can be made there.
    """
    return write_new_folder(out, lambda folder: _fill(folder, seed, sizes))


def write_new_folder(
    out: Path, fill: Callable[[Path], Mapping[str, object]]
) -> Mapping[str, object]:
    """Make a folder and fill it; it appears when it is complete.

    Raises:
        UserError: the folder exists and holds something.
        OSError: no folder can be made there.
    """
    if out.exists() and any(out.iterdir()):
        raise UserError(
            Complaint("Conflict", what="is not empty", where=str(out), fix="name a new folder")
        )
    # Renamed when complete: a folder that exists is whole.
    partial = out.with_name(f".{out.name}.{os.getpid()}")
    found = fill(partial)
    if out.exists():
        out.rmdir()
    partial.rename(out)
    return found


def _fill(folder: Path, seed: int, sizes: Sizes) -> Mapping[str, object]:
    source = Source(seed)
    # Measured tasks first: no other split can take one of theirs.
    held_out = list(source.take("held-out", sizes.held_out))
    train = list(source.take("train", sizes.train))
    shown = corpus.demonstrate_all(source.take("traces", sizes.traces), seed)
    plain = list(source.take("repositories", sizes.repositories))
    _write_tasks(folder / "tasks" / "held-out", "held-out", held_out)
    _write_tasks(folder / "tasks" / "train", "train", train)
    _write_data(folder / "data", shown, plain, seed)
    model_folder.write(folder / "model", _tokenizer(shown))
    found = {
        "seed": seed,
        "train": sizes.train,
        "held_out": sizes.held_out,
        "traces": sizes.traces,
        "repositories": sizes.repositories,
        **facts.of_demonstrations(shown),
        **facts.of_problems(train, source),
        **facts.of_transcripts(ChatFormat.load(folder / "model"), shown),
        **facts.of_files(
            folder, ("model/tokenizer.json", "data/traces.jsonl", "data/repositories.jsonl")
        ),
    }
    (folder / "facts.json").write_text(json.dumps(found, indent=2) + "\n")
    return found


def _tokenizer(shown: Sequence[Demonstration]) -> Tokenizer:
    return tokenizer.train(
        text
        for each in shown[: tokenizer.NUM_TRANSCRIPTS]
        for text in corpus.transcript_texts(each.messages)
    )


def _write_tasks(folder: Path, split: str, problems: Sequence[Problem]) -> None:
    for index, problem in enumerate(problems):
        task_folders.write(problem, folder / f"{split}-{index:04d}")


def _write_data(
    folder: Path, shown: Sequence[Demonstration], plain: Sequence[Problem], seed: int
) -> None:
    folder.mkdir(parents=True)
    _write_lines(folder / "traces.jsonl", ({"messages": each.messages} for each in shown))
    # Reproducible on purpose, as the problems are.
    random = Random(f"etude/{seed}/quotes")  # noqa: S311
    texts = ({"text": corpus.repository_text(problem, random)} for problem in plain)
    _write_lines(folder / "repositories.jsonl", texts)


def _write_lines(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)


def main(arguments: Sequence[str]) -> int:
    """Generate, and print what was generated."""
    usual = Sizes()
    parser = argparse.ArgumentParser(prog="python -m etude.demo.generate")
    parser.add_argument("--out", type=Path, required=True, help="folder to create")
    parser.add_argument("--seed", type=int, default=0, help="everything follows from it")
    parser.add_argument("--train", "--rl", type=int, default=usual.train, help="tasks to train on")
    parser.add_argument("--held-out", type=int, default=usual.held_out, help="tasks to measure on")
    parser.add_argument("--traces", type=int, default=usual.traces, help="demonstrations")
    given = parser.parse_args(arguments)
    try:
        sizes = Sizes(train=given.train, held_out=given.held_out, traces=given.traces)
        found = generate(given.out, seed=given.seed, sizes=sizes)
    except (UserError, OSError) as error:
        return exit_codes.report_error(error)
    sys.stdout.write(
        f"{found['train']} training tasks, {found['held_out']} held-out tasks,"
        f" {found['traces']} demonstrations of {found['transcript_tokens_mean']:.0f} tokens\n"
        f"the demonstrators succeed in {found['demonstrators_success']:.3f}\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
