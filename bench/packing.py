"""Packing of sequences into the microbatches of ranks, against verl's partitions.

python bench/packing.py [--sequences 512] [--ranks 8] [--tokens 32768]

Lengths are log-normal. Ranks wait for each other at each microbatch, as all have collectives: the
efficiency is the mean of their tokens over the most of any rank, summed over microbatches; padding
would count as nothing. The fill is tokens over the room of all microbatches, the most tokens each.
Each rank has the same number of microbatches, so that no plan fills more than the bound: tokens
over the room of the least such number.
verl 0.9.1 runs in an environment of its own, which this script installs.

Examples:
  make bench-trainer
  python bench/packing.py --sequences 4096 --tokens 65536   many sequences
"""

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))  # figures are recorded as tests do

from tests.support import figures
from tests.support.programs import AbsentError, install_programs

from etude.trainer.learner.sequence_packing import plan_microbatches

HERE = Path(__file__).parent
MEDIAN_TOKENS, SIGMA, FEWEST_TOKENS = 1_500, 1.0, 16
GOAL = 0.97
LIMIT_S = 300

Plan = Sequence[Sequence[Sequence[int]]]
"""Sequences of each microbatch of each rank."""


class PackingFigures(NamedTuple):
    """Figures of one plan."""

    efficiency: float
    fill: float
    imbalance: float
    """Tokens of the busiest rank over the mean."""
    seconds: float


def main() -> None:
    """Measure, print, and merge the figures into bench/out/trainer.json.

    Raises:
        SystemExit: with 1 if the goal is missed.
    """
    given = _arguments()
    lengths = draw_lengths(given.sequences, most=given.tokens, seed=given.seed)
    began_s = time.perf_counter()
    plan = plan_microbatches(lengths, ranks=given.ranks, max_tokens=given.tokens, packed=True)
    own = judge_plan(plan, lengths, given.tokens, seconds=time.perf_counter() - began_s)
    found = {"etude": own} | _ask_verl(lengths, given)
    table = Table("plan", "efficiency", "fill", "busiest rank / mean", "ms")
    for name, each in found.items():
        cells = (each.efficiency, each.fill, each.imbalance)
        table.add_row(name, *(f"{cell:.4f}" for cell in cells), f"{1e3 * each.seconds:.1f}")
    console = Console(width=None if os.isatty(1) else 120)
    bound = fill_bound(lengths, ranks=given.ranks, tokens=given.tokens)
    table.add_row("bound", "", f"{bound:.4f}", "", "")
    console.print(table)
    console.print(f"goals: an efficiency of {GOAL}, and a fill of {min(GOAL, bound):.4f}")
    figures.record(
        "trainer",
        packing_efficiency=round(own.efficiency, 4),
        packing_fill=round(own.fill, 4),
        packing_fill_bound=round(bound, 4),
        packing_fill_of_bound=round(own.fill / bound, 4),
        packing_imbalance=round(own.imbalance, 5),
        packing_ms=round(1e3 * own.seconds, 2),
        **_peer_figures(found),
    )
    if own.efficiency < GOAL or own.fill < min(GOAL, bound):
        raise SystemExit(1)


def draw_lengths(sequences: int, *, most: int, seed: int) -> list[int]:
    """Draw log-normal lengths, cut at the most tokens of a microbatch."""
    draw = random.Random(seed)  # noqa: S311 - a workload
    drawn = (int(MEDIAN_TOKENS * draw.lognormvariate(0.0, SIGMA)) for _ in range(sequences))
    return [min(most, max(FEWEST_TOKENS, each)) for each in drawn]


def fill_bound(lengths: Sequence[int], *, ranks: int, tokens: int) -> float:
    """The most that any plan can fill, as each rank has the same number of microbatches."""
    room = ranks * tokens
    return sum(lengths) / (room * -(-sum(lengths) // room))


def judge_plan(
    plan: Plan, lengths: Sequence[int], tokens: int, *, seconds: float
) -> PackingFigures:
    """Figures of a plan; a rank with fewer microbatches than others waits in the rest."""
    loads = [[sum(lengths[i] for i in part) for part in share] for share in plan]
    count, total = max(map(len, loads)), sum(lengths)
    longest = [max(load[i] if i < len(load) else 0 for load in loads) for i in range(count)]
    return PackingFigures(
        efficiency=total / (len(plan) * sum(longest)),
        fill=total / (len(plan) * count * tokens),
        imbalance=max(map(sum, loads)) * len(plan) / total,
        seconds=seconds,
    )


def _ask_verl(lengths: Sequence[int], given: argparse.Namespace) -> dict[str, PackingFigures]:
    """Verl's plan; none if it cannot be installed."""
    try:
        programs = install_programs(HERE / "oracles_bench" / "oracles.txt")
    except AbsentError as error:
        print(f"packing: verl cannot be installed: {error}", file=sys.stderr)
        return {}
    question = {"lengths": list(lengths), "ranks": given.ranks, "tokens": given.tokens}
    done = subprocess.run(
        [str(programs / "python"), str(HERE / "controller_bench" / "verl_partitions.py")],
        input=json.dumps(question),
        capture_output=True,
        text=True,
        check=True,
        timeout=LIMIT_S,
    )
    answer = json.loads(done.stdout.splitlines()[-1])
    plan = answer["plan"]
    return {"verl": judge_plan(plan, lengths, given.tokens, seconds=answer["seconds"])}


def _peer_figures(found: dict[str, PackingFigures]) -> dict[str, float]:
    if "verl" not in found:
        return {}
    peer = found["verl"]
    return {
        "packing_efficiency_verl": round(peer.efficiency, 4),
        "packing_fill_verl": round(peer.fill, 4),
        "packing_imbalance_verl": round(peer.imbalance, 5),
        "packing_ms_verl": round(1e3 * peer.seconds, 2),
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=512)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32_768, help="most of one microbatch")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
