"""Gradients of our algorithms and corrections against other code bases, in float64.

python bench/oracles.py [--cases 40] [--seed 0]

verl, TRL and OpenRLHF run in an environment of their own, which is made on first use. Gradients
with respect to log-probs are compared on a fixed batch and on random ones, with groups of two and
more, holes in rows, and rows without a token. Estimators of divergences are compared with exact
enumerations, and best-of-K with the mean over all subsets. Ends with 1 if a bound is missed.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from oracles_bench.cases import FORMULAS, Case, draw_cases, fixed_case
from oracles_bench.enumeration import enumerate_exactly
from oracles_bench.gradients import compute_gradient, prepare
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from tests.support.programs import AbsentError, install_programs  # noqa: E402 - of the checkout

HERE = Path(__file__).parent
OUT = HERE / "out" / "oracles.json"
ORACLES = ("verl", "TRL", "OpenRLHF")
EXACT = 1e-12
WITH_EPSILON = 1e-8
HAVE_EPSILON = {
    f"{formula}/{oracle}" for formula in ("GRPO", "GSPO", "SAPO") for oracle in ("verl", "OpenRLHF")
}
"""Pairs whose other side adds 1e-8 to the number of tokens of a rollout. They are not compared on
batches with a rollout of one token, which shows that number itself."""
LIMIT_S = 600

Differences = dict[str, float]
"""Largest relative difference by formula/oracle."""


def ask_oracles(questions: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Gradients of all code bases for each case.

    Raises:
        SystemExit: they cannot be installed, or fail.
    """
    try:
        programs = install_programs(HERE / "oracles_bench" / "oracles.txt")
    except AbsentError as error:
        raise SystemExit(f"oracles: cannot be installed: {error}") from error
    done = subprocess.run(
        [str(programs / "python"), str(HERE / "oracles_bench" / "other_losses.py")],
        input="".join(json.dumps(question) + "\n" for question in questions),
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    if done.returncode:
        raise SystemExit(f"oracles: {done.stderr[-2_000:]}")
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return [json.loads(line) for line in lines]


def compare(cases: Sequence[Case]) -> Differences:
    """Compare the gradients of all formulas with all code bases that have them."""
    asked: list[tuple[str, Case, torch.Tensor]] = []
    questions = []
    for name, formula in FORMULAS.items():
        for case in cases:
            prepared = prepare(case, formula)
            gradient, advantages = compute_gradient(prepared, formula)
            asked.append((name, case, gradient))
            question = prepared._replace(advantages=advantages).as_json()
            questions.append(question | {"formula": name})
    found: Differences = {}
    for (name, case, ours), answer in zip(asked, ask_oracles(questions), strict=True):
        for oracle, listed in answer.items():
            key = f"{name}/{oracle}"
            if key in HAVE_EPSILON and case.has_short_row:
                continue
            theirs = torch.tensor(listed, dtype=torch.float64)
            size = float(theirs.abs().max()) or 1.0
            difference = float((ours - theirs).abs().max()) / size
            found[key] = max(found.get(key, 0.0), difference)
    return found


def bound_of(pair: str) -> float:
    """Largest difference that is allowed."""
    return WITH_EPSILON if pair in HAVE_EPSILON else EXACT


def show(differences: Differences, exact: Mapping[str, float], console: Console) -> list[str]:
    """Print the tables; lists what misses its bound."""
    table = Table(box=None, pad_edge=False)
    for column in ("largest relative difference", *ORACLES):
        table.add_column(column, justify="left" if column not in ORACLES else "right")
    for name in FORMULAS:
        pairs = [f"{name}/{oracle}" for oracle in ORACLES]
        table.add_row(name, *(f"{differences[p]:.1e}" if p in differences else "-" for p in pairs))
    console.print(table)
    for name, difference in exact.items():
        console.print(f"{name}: {difference:.1e}")
    missed = [pair for pair, value in differences.items() if not value <= bound_of(pair)]
    return missed + [name for name, value in exact.items() if not value <= EXACT]


def main() -> None:
    """Compare, print, write bench/out/oracles.json.

    Raises:
        SystemExit: a bound is missed.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=40, help="random batches for each formula")
    parser.add_argument("--seed", type=int, default=0)
    given, console = parser.parse_args(), Console()
    cases = [fixed_case(), *draw_cases(count=given.cases, seed=given.seed)]
    differences = compare(cases)
    exact = enumerate_exactly(seed=given.seed)
    missed = show(differences, exact, console)
    OUT.parent.mkdir(exist_ok=True)
    figures = {"max_rel_grad_diff": differences, "max_diff_exact": dict(exact)}
    OUT.write_text(json.dumps(figures, indent=2, sort_keys=True) + "\n")
    if missed:
        raise SystemExit(f"oracles: above its bound: {', '.join(missed)}")


if __name__ == "__main__":
    main()
