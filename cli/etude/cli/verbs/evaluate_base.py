"""`etude model evaluate`: figures of base models side by side, to choose the one to train."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from etude.cli.output import Exit, console, print_row, say
from etude.cli.verbs.options import AsJson

Row = dict[str, Any]


def evaluate_base(  # noqa: PLR0913 - its options
    models: Annotated[list[Path], typer.Argument(help="Folders of models with their weights.")],
    *,
    text: Annotated[
        Path | None,
        typer.Option(help="Code or prose: a JSONL file with `text`, a file, or a folder."),
    ] = None,
    text_kib: Annotated[int, typer.Option(min=1, help="KiB of it that are scored.")] = 256,
    questions: Annotated[
        Path | None, typer.Option(help="JSONL file: question, choices, answer from 0.")
    ] = None,
    programs: Annotated[
        int, typer.Option(min=1, help="Programs of each length whose state is asked for.")
    ] = 40,
    context: Annotated[int, typer.Option(min=16, help="Tokens of the longest sequence.")] = 2_048,
    seed: Annotated[int, typer.Option(min=0, help="Of the programs.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Measure perplexity, knowledge and state tracking of base models, on a GPU if there is one.

    Bits per byte compare models of different tokenizers; perplexity by token does not. Questions
    are answered by the likeliest choice. State tracking is generated: the value of a variable after
    2 to 32 assignments and swaps, of five digits. What there is to score, and the time that is
    left, are said on the way.
    """
    options = ["--text-kib", str(text_kib), "--programs", str(programs)]
    options += ["--context", str(context), "--seed", str(seed)]
    options += ["--text", str(text)] if text is not None else []
    options += ["--questions", str(questions)] if questions is not None else []
    table: dict[str, dict[str, str]] = {}
    for model in models:
        for row in _measure(model, options):
            if "measure" not in row:
                say(f"{model}: {_describe_work(row)}")
            elif as_json:
                print_row({"model": str(model), **row})
            else:
                name, value = _describe(row)
                say(f"{model}: {name} {value}")
                table.setdefault(name, {})[str(model)] = value
    if not as_json:
        _show(table, [str(model) for model in models])


def _measure(model: Path, options: list[str]) -> Iterator[Row]:
    """Rows of one model, in a process of its own: its memory is free for the next one.

    Raises:
        SystemExit: it cannot be evaluated.
    """
    command = [sys.executable, "-m", "etude.trainer.commands.evaluate_base", str(model), *options]
    with tempfile.TemporaryFile("w+b") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        for line in process.stdout or ():
            yield json.loads(line)
        code = process.wait()
        errors.seek(0)
        problem = errors.read().decode(errors="replace").strip()
    if code:
        say(problem)
        raise SystemExit(Exit.INVALID if code == Exit.INVALID else Exit.BUG)


def _describe_work(row: Row) -> str:
    """Size of the work, or its progress."""
    if "progress" not in row:
        size = f"{row['parameters'] / 1e6:,.0f} M parameters on {row['device']}"
        return f"{size}, {row['tokens']:,} tokens to score"
    left_s = int(row["left_s"])
    left = f"{left_s} s" if left_s < 120 else f"{round(left_s / 60)} min"
    done = f"{row['done']} of {row['of']} {row['progress']}"
    return f"{done}; {100 * row['share']:.0f} % of all, about {left} left"


def _describe(row: Row) -> tuple[str, str]:
    """Name of a measure, and its value as text."""
    if row["measure"] == "text":
        return "bits per byte", f"{row['bits_per_byte']:.4f} (perplexity {row['perplexity']:.2f})"
    share = f"{100 * row['accuracy']:.1f} ± {100 * row['standard_error']:.1f} %"
    chance = f"(chance {100 * row['chance']:.0f} %)"
    if row["measure"] == "questions":
        return f"questions {chance}", share
    return f"state after {row['statements']} statements {chance}", share


def _show(table: dict[str, dict[str, str]], models: list[str]) -> None:
    from rich.table import Table

    shown = Table("measure", *(Path(model).name for model in models))
    for name, values in table.items():
        shown.add_row(name, *(values[model] for model in models))
    console().print(shown)
