"""`etude compare`: one evaluation against another, task by task, and what a gate would say."""

import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from etude.cli import runs
from etude.cli.output import Exit, print_row, say
from etude.cli.verbs.options import AsJson
from etude.common.errors import Problem, UserError
from etude.common.evaluation.scores import METRICS

if TYPE_CHECKING:
    from etude.common.evaluation.gate import MarginRule


class RecordedEvaluation(NamedTuple):
    """The evaluation of a run at a global step."""

    run: str
    step: int | None
    """None for the newest."""


def compare(
    served: Annotated[str, typer.Argument(metavar="RUN[@STEP]", help="The policy in use.")],
    candidate: Annotated[str, typer.Argument(metavar="RUN[@STEP]", help="The one to follow it.")],
    *,
    evaluation: Annotated[
        str, typer.Option(help="Its name; NAME-greedy for its greedy pass.")
    ] = "held-out",
    margin: Annotated[
        list[str], typer.Option(help=f"METRIC=LOSS that is allowed; metrics: {', '.join(METRICS)}.")
    ] = ["success=0.02"],  # noqa: B006 - Typer copies it
    min_tasks: Annotated[int, typer.Option(help="Fewer common tasks decide nothing.")] = 100,
    as_json: AsJson = False,
) -> None:
    """Compare two recorded evaluations, paired by task, and decide as an evaluation gate does."""
    from etude.common.evaluation.gate import GateVerdict
    from etude.common.evaluation.row_comparison import compare_rows

    rules = [parse_rule(text) for text in margin]
    split = f"eval-{evaluation}"
    old, new = (list(_read_rows(parse_evaluation(text), split)) for text in (served, candidate))
    differences, decision = compare_rows(new, old, rules, min_tasks=min_tasks)
    if as_json:
        figures = {metric: asdict(each) for metric, each in differences.items()}
        results = [asdict(each) for each in decision.results]
        print_row({"verdict": decision.verdict, "results": results, "differences": figures})
    say(decision.sentence)
    if decision.verdict is not GateVerdict.PASSED:
        raise SystemExit(Exit.NO)


def parse_evaluation(text: str) -> RecordedEvaluation:
    """The evaluation in a text such as demo@40, or demo for its newest."""
    match = re.fullmatch(r"(.+)@(\d{1,9})", text)
    return RecordedEvaluation(match[1], int(match[2])) if match else RecordedEvaluation(text, None)


def parse_rule(text: str) -> "MarginRule":
    """The rule in a text such as success=0.02.

    Raises:
        UserError: there is no such metric, or the margin is no number above 0.
    """
    from etude.common.evaluation.row_comparison import metric_rule

    name, _, number = text.partition("=")
    fix = f"give METRIC=LOSS with one of the metrics {', '.join(METRICS)}"
    if name not in METRICS:
        raise UserError(Problem("Usage", f"names no metric: {name!r}", f"--margin {text}", fix))
    try:
        return metric_rule(name, float(number))
    except ValueError as cause:
        raise UserError(Problem("Usage", str(cause), f"--margin {text}", fix)) from cause


def _read_rows(evaluation: RecordedEvaluation, split: str) -> Iterator[dict[str, Any]]:
    """The rollouts of an evaluation.

    Raises:
        UserError: the run has no such evaluation at this step.
    """
    from etude.common.run_folder.record import FolderRecord

    # Results of an evaluation without a run are a folder too.
    folder = Path(evaluation.run)
    if not (folder / "rollouts").is_dir():
        folder = runs.folder_of(evaluation.run)
    record = FolderRecord(folder)
    steps = [step for step, name in record.splits() if name == split]
    if not steps or (evaluation.step is not None and evaluation.step not in steps):
        name = evaluation.run if evaluation.step is None else f"{evaluation.run}@{evaluation.step}"
        listed = ", ".join(map(str, steps)) or "no step"
        fix = "name a step that has it, or another --evaluation"
        raise UserError(Problem("NotFound", f"has {split} at {listed}", name, fix))
    return record.rollouts(steps[-1] if evaluation.step is None else evaluation.step, split)
