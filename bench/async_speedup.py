"""Asynchronous against synchronous training, under tools whose times have a heavy tail.

python bench/async_speedup.py [--steps 24] [--staleness 4] [--median 0.25] [--sigma 1.2]

The controller, its client of engines and a small engine are real, and tools really sleep: a
log-normal time after each turn but the last. A training step takes no time, so that the whole
difference is in waiting for the slowest rollout. The same tasks, sizes and seeds in mode Sync and
in mode FullyAsync; tokens that were sampled and trained, for each second. The journals are audited
for the bound of staleness. Exits with 1 if it was broken.

Examples:
  make bench-trainer
  python bench/async_speedup.py --steps 6   a first look
"""

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))  # the learner is that of the tests

from controller_bench.engine import serve_engine
from controller_bench.run import RunShape, audit, open_controller, train_to_end
from controller_bench.sleeping import TURN_TOKENS, SleepingRollouts, ToolPlan
from tests.support import figures

PROMPTS, GROUP_SIZE, TURNS = 4, 4, 4
GOAL = 2.5


class Outcome(NamedTuple):
    """Outcome of one mode."""

    tokens_per_s: float
    wall_s: float
    cpu_s: float
    """Of the controller's process, the workers in it."""
    violations: int


def main() -> None:
    """Measure both modes, print, and merge the figures into bench/out/trainer.json.

    Raises:
        SystemExit: with 1 if the bound of staleness was broken.
    """
    given = _arguments()
    plan = ToolPlan(TURNS, given.median, given.sigma)
    with tempfile.TemporaryDirectory(prefix="etude-bench-") as name:
        folder = Path(name)
        with serve_engine(folder / "model") as target:

            def measure(staleness: int, steps: int) -> Outcome:
                shape = RunShape(PROMPTS, GROUP_SIZE, staleness, steps, given.seed)
                place = folder / f"{staleness}-{steps}"
                place.mkdir()
                return asyncio.run(_measure(shape, SleepingRollouts(target, plan), place))

            measure(1, 1)  # the first completions of an engine are slow
            modes = {each: measure(each, given.steps) for each in (0, given.staleness)}
    sync, found = modes[0], modes[given.staleness]
    speedup = found.tokens_per_s / sync.tokens_per_s
    _print(modes)
    violations = sync.violations + found.violations
    figures.record(
        "trainer",
        async_speedup=round(speedup, 2),
        async_staleness=given.staleness,
        async_steps=given.steps,
        async_tokens_per_s=round(found.tokens_per_s, 1),
        sync_tokens_per_s=round(sync.tokens_per_s, 1),
        async_wall_s=round(found.wall_s, 2),
        sync_wall_s=round(sync.wall_s, 2),
        async_cpu_s=round(found.cpu_s, 2),
        sync_cpu_s=round(sync.cpu_s, 2),
        staleness_bound_violations=violations,
    )
    if violations:
        raise SystemExit(1)


def _print(modes: Mapping[int, Outcome]) -> None:
    """Print the outcome of each bound of staleness, of which 0 is Sync."""
    table = Table("mode", "S", "tokens/s", "of Sync", "wall s", "CPU s", "violations")
    for staleness, each in modes.items():
        table.add_row(
            "FullyAsync" if staleness else "Sync",
            str(staleness),
            f"{each.tokens_per_s:.0f}",
            f"{each.tokens_per_s / modes[0].tokens_per_s:.2f} x",
            f"{each.wall_s:.1f}",
            f"{each.cpu_s:.1f}",
            str(each.violations),
        )
    console = Console(width=None if os.isatty(1) else 120)
    console.print(table)
    console.print(f"goal: {GOAL} x at S = 4")


async def _measure(shape: RunShape, workers: SleepingRollouts, folder: Path) -> Outcome:
    run = open_controller(shape, folder, workers)
    workers.runs.append(run)
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    await train_to_end(run, shape)
    wall_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    await workers.close()
    tokens = shape.groups * shape.group_size * TURNS * TURN_TOKENS
    findings = audit(run, shape).findings
    return Outcome(tokens / wall_s, wall_s, cpu_s, len(findings))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--staleness", type=int, default=4, choices=range(1, 65), metavar="S")
    parser.add_argument("--median", type=float, default=0.25, help="seconds of a tool")
    parser.add_argument("--sigma", type=float, default=1.2, help="of the logarithm of these times")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
