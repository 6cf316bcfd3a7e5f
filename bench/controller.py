"""The controller at its size: groups a second, rollouts in flight, memory, and its journal.

python bench/controller.py [--in-flight 10000] [--steps 12] [--tokens 512] [--median 0.05]

A whole run of the real controller on a folder; workers end rollouts by a seeded plan of log-normal
durations, and a training step takes no time. Two processes beside it write the tokens of rollouts
to the store of the run, as rollout workers do. Nobody reads them here, as learner ranks would, or
writes rollouts for people. A transition is a group that is admitted, becomes ready, or goes into a
batch. The limits beside it, in the same call: an event loop in which the same rollouts end and
nothing else happens, and a file with one fsync for each record.

Examples:
  make bench-trainer
  python bench/controller.py --steps 4   a first look
"""

import argparse
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))  # the learner is that of the tests

from controller_bench.appends import AppendFigures, measure_appends
from controller_bench.flight import (
    GROUP_SIZE,
    TRANSITIONS,
    FlightFigures,
    FlightSize,
    measure_empty_loop,
    measure_flight,
)
from tests.support import figures

TRANSITIONS_GOAL, APPENDS_GOAL = 1_000, 2_000
ACK_GOAL_MS, RSS_GOAL_GIB = 100, 1.0
APPEND_S = 6.0


def main() -> None:
    """Measure, print, and merge the figures into bench/out/trainer.json.

    Raises:
        SystemExit: with 1 if the journal breaks an invariant.
    """
    size = _arguments()
    # Memory is that of a process that does nothing else.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        flight = pool.submit(measure_flight, size).result()
    empty_cpu_s = measure_empty_loop(size)
    appends = measure_appends(APPEND_S)
    _print(size, flight, empty_cpu_s, appends)
    transitions = TRANSITIONS * flight.groups
    figures.record(
        "trainer",
        controller_transitions_per_s=round(transitions / flight.wall_s, 1),
        controller_transitions_per_cpu_s=round(transitions / flight.cpu_s, 1),
        controller_groups_per_s=round(flight.groups / flight.wall_s, 1),
        controller_wall_s=round(flight.wall_s, 2),
        controller_cpu_s=round(flight.cpu_s, 2),
        controller_busy=round(flight.cpu_s / flight.wall_s, 2),
        controller_of_empty_loop=round(flight.cpu_s / empty_cpu_s, 2),
        controller_in_flight=flight.in_flight,
        controller_rollout_tokens=size.tokens,
        controller_rss_gib=round(flight.rss_gib, 3),
        controller_findings=flight.findings,
        journal_appends_per_s=round(appends.per_s, 1),
        journal_ack_p99_ms=round(appends.p99_ms, 1),
        journal_of_fsync_each=round(appends.per_s / appends.fsync_per_s, 2),
        journal_cpu_s=round(appends.cpu_s, 2),
    )
    if flight.findings:
        raise SystemExit(1)


def _print(
    size: FlightSize, flight: FlightFigures, empty_cpu_s: float, appends: AppendFigures
) -> None:
    transitions = TRANSITIONS * flight.groups
    table = Table("figure", "measured", "goal", "beside it", "CPU s")
    table.add_row(
        "group transitions/s",
        f"{transitions / flight.wall_s:,.0f}",
        f"{TRANSITIONS_GOAL:,}",
        f"{flight.cpu_s / empty_cpu_s:.1f} x the CPU of an empty loop",
        f"{flight.cpu_s:.1f}",
    )
    table.add_row(
        "group transitions/CPU-s",
        f"{transitions / flight.cpu_s:,.0f}",
        "",
        f"busy for {flight.cpu_s / flight.wall_s:.0%} of the time; the writers limit the rest",
        f"{empty_cpu_s:.1f}",
    )
    table.add_row("rollouts in flight", f"{flight.in_flight:,}", f"{size.in_flight:,}", "", "")
    table.add_row(
        "RSS, GiB",
        f"{flight.rss_gib:.2f}",
        f"{RSS_GOAL_GIB:.0f}",
        f"{flight.started_rss_gib:.2f} at start, {size.tokens} tokens a rollout",
        "",
    )
    table.add_row("broken invariants", str(flight.findings), "0", "", "")
    table.add_row(
        "journal: durable appends/s",
        f"{appends.per_s:,.0f}",
        f"{APPENDS_GOAL:,}",
        f"{appends.fsync_per_s:,.0f} with one fsync each:"
        f" {appends.per_s / appends.fsync_per_s:.1f} x",
        f"{appends.cpu_s:.1f}",
    )
    table.add_row("journal: ack p99, ms", f"{appends.p99_ms:.0f}", f"{ACK_GOAL_MS}", "", "")
    Console(width=None if os.isatty(1) else 120).print(table)


def _arguments() -> FlightSize:
    parser = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--in-flight", type=int, default=10_000, help="rollouts at the same time")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=512, help="of each rollout")
    parser.add_argument("--median", type=float, default=0.05, help="seconds of a rollout")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    least = GROUP_SIZE * 5
    if given.in_flight < least:
        parser.error(f"--in-flight must be at least {least}")
    return FlightSize(given.in_flight, given.steps, given.tokens, given.median, given.seed)


if __name__ == "__main__":
    main()
