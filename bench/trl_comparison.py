"""A training step and its rollouts beside TRL's, on the same weights and lengths.

python bench/trl_comparison.py [--rounds 3] [--threads 2] [--spread 0]

SmolLM2-135M on the CPU in fp32. Each side is a process of its own; they take turns, one step each,
on the same cores. A step samples completions of given lengths and trains on them once. Ours samples
by the engine client from vLLM, TRL's by transformers' generate(); bringing new weights to the
engine is in neither figure. The rate is tokens per CPU-second: padding and repeated passes add to
the time and not to the tokens. Needs the dependency group bench: `make bench-trl`.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from learner_bench.figures import merge_figures
from learner_bench.side import ATTENTION, MATMULS
from learner_bench.workload import SPREAD, STATED, Workload, draw_steps
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "runs/smollm2/inputs/etude/smollm2/model"
SIDES = {"Etude": "etude_side", "TRL": "trl_side"}
PARTS = ("rollout", "train")
GOAL = 1.5

Report = Mapping[str, Any]
"""A StepReport as JSON."""


@dataclass(slots=True)
class Side:
    """The process of one side."""

    process: subprocess.Popen[str]
    reports: list[Report] = field(default_factory=list)
    """Of the steps that count."""
    profiled: Report = field(default_factory=dict)

    @classmethod
    def start(cls, module: str, workload: Path, *, threads: int, log: Path) -> Self:
        """Start a side, and wait until its model is loaded."""
        environment = os.environ | {
            "PYTHONPATH": str(Path(__file__).parent),
            "OMP_NUM_THREADS": str(threads),
            # A team of threads that spins while it waits is CPU time that no side makes use of.
            "OMP_WAIT_POLICY": "passive",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        with log.open("w") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", f"learner_bench.{module}", str(workload)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
            )
        side = cls(process)
        side._read(log)
        return side

    def make_step(self, step: int, log: Path, *, is_profiled: bool = False) -> Report:
        """Make one step."""
        assert self.process.stdin is not None  # noqa: S101 - a pipe was asked for
        self.process.stdin.write(json.dumps({"step": step, "is_profiled": is_profiled}) + "\n")
        self.process.stdin.flush()
        return self._read(log)

    def _read(self, log: Path) -> Report:
        assert self.process.stdout is not None  # noqa: S101 - as above
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"a side ended; the end of its log:\n{log.read_text()[-3_000:]}")
        report: Report = json.loads(line)
        return report

    def total(self, part: str, what: str) -> float:
        """Sum over the steps that count."""
        return float(sum(report[part][what] for report in self.reports))

    def rate(self, part: str, time: str = "cpu_s") -> float:
        """Tokens per second."""
        return self.total(part, "tokens") / self.total(part, time)


def compare(workload: Workload, rounds: int, scratch: Path, console: Console) -> dict[str, Side]:
    """Run both sides in turns: a step that does not count, the rounds, and a profiled step."""
    workload.write(scratch / "workload.json")
    sides = {}
    for name, module in SIDES.items():
        sides[name] = Side.start(
            module,
            scratch / "workload.json",
            threads=workload.threads,
            log=scratch / f"{name}.log",
        )
        console.log(f"{name} has loaded the model")
    for step in range(rounds + 2):
        for name, side in sides.items():
            log = scratch / f"{name}.log"
            report = side.make_step(step, log, is_profiled=step == rounds + 1)
            shown = ", ".join(
                f"{part} {report[part]['tokens']} tokens in {report[part]['cpu_s']:.1f} CPU-s,"
                f" {report[part]['wall_s']:.1f} s"
                for part in PARTS
            )
            console.log(f"step {step} {name}: {shown}")
            if step == rounds + 1:
                side.profiled = report
            elif step > 0:
                side.reports.append(report)
    for side in sides.values():
        assert side.process.stdin is not None  # noqa: S101 - as above
        side.process.stdin.close()
        side.process.wait(timeout=60)
    return sides


def operator_share(report: Report, *, is_counted: Callable[[str], bool]) -> float:
    """Share of the profiled training time that operators took, those inside them left out."""
    seconds: Mapping[str, float] = report["operators"]
    return sum(time for name, time in seconds.items() if is_counted(name)) / sum(seconds.values())


def matmul_share(report: Report) -> float:
    """Share of matrix products in the profiled training time."""
    return operator_share(report, is_counted=MATMULS.__contains__)


def summarise(sides: Mapping[str, Side]) -> dict[str, float]:
    """Figures for the file."""
    ours, theirs = sides["Etude"], sides["TRL"]
    figures = {}
    for part in PARTS:
        figures[f"{part}_tokens_per_cpu_s"] = ours.rate(part)
        figures[f"{part}_tokens_per_cpu_s_trl"] = theirs.rate(part)
        figures[f"{part}_tokens_per_cpu_s_vs_trl"] = ours.rate(part) / theirs.rate(part)
        figures[f"{part}_tokens_per_s_vs_trl"] = ours.rate(part, "wall_s") / theirs.rate(
            part, "wall_s"
        )
    figures["train_matmul_share"] = matmul_share(ours.profiled)
    figures["train_matmul_share_trl"] = matmul_share(theirs.profiled)
    return figures


def show(sides: Mapping[str, Side], figures: Mapping[str, float], console: Console) -> None:
    """Print the table, and what bounds the ratios."""
    table = Table(box=None, pad_edge=False)
    for column in ("", "Etude", "TRL", "ratio", "goal"):
        table.add_column(column, justify="left" if not column else "right")
    units = {"cpu_s": "tokens per CPU-s", "wall_s": "tokens/s"}
    for part in PARTS:
        for time, unit in units.items():
            ours, theirs = (sides[name].rate(part, time) for name in SIDES)
            goal = f"{GOAL}" if time == "cpu_s" else ""
            table.add_row(
                f"{part}, {unit}", f"{ours:.1f}", f"{theirs:.1f}", f"{ours / theirs:.2f}", goal
            )
        steps = [sides[name].total(part, "wall_s") / len(sides[name].reports) for name in SIDES]
        table.add_row(f"{part}, s a step", *(f"{each:.1f}" for each in steps), "", "")
    console.print(table)
    for name, side in sides.items():
        attention = operator_share(side.profiled, is_counted=lambda name: ATTENTION in name)
        console.print(
            f"{name}: {matmul_share(side.profiled):.0%} of the training step is matrix"
            f" products, {attention:.0%} attention"
        )
    console.print(f"Lengths: {STATED}. Figures: {', '.join(sorted(figures))}")


def parse_arguments() -> argparse.Namespace:
    """Read the arguments; refuse what would end a side later.

    Raises:
        SystemExit: TRL is not installed.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=min(2, len(os.sched_getaffinity(0))))
    parser.add_argument("--spread", type=float, default=SPREAD, help="of the lengths; 0: all equal")
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    if importlib.util.find_spec("trl") is None:
        raise SystemExit("trl_comparison: TRL is not installed\n  fix: make bench-trl")
    return given


def main() -> None:
    """Compare, print, write; other spreads than the stated one are printed only."""
    given, console = parse_arguments(), Console()
    convert = [sys.executable, str(ROOT / "examples/smollm2/convert.py"), str(given.model)]
    subprocess.run(convert, check=True)
    workload = Workload(
        model=str(given.model),
        threads=given.threads,
        steps=draw_steps(given.model, steps=given.rounds + 2, seed=given.seed, spread=given.spread),
    )
    with tempfile.TemporaryDirectory(prefix="etude-trl-") as scratch:
        sides = compare(workload, given.rounds, Path(scratch), console)
    figures = summarise(sides)
    show(sides, figures, console)
    if given.spread == SPREAD:
        merge_figures(figures)


if __name__ == "__main__":
    main()
