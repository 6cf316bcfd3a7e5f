"""What a new policy version costs to move: bytes, processor, memory, and the pause of the swap.

python bench/weights.py [--cache DIR] [--run DIR] [--pretraining-steps N] [--repeats N] [--tiny]

Every codec moves the same versions through its own sender and receiver in this process, on one
thread of one processor, and must deliver every bit. Ratios are of CPU seconds, the best of three;
wall time stands beside them. Run it on an idle machine. The first run makes the trajectories, which
takes about ten minutes; they are kept.
"""

import argparse
import json
import os
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from weights_bench import bound, clock, figures, measure, report, sources
from weights_bench.contenders import CONTENDERS
from weights_bench.figures import Rows
from weights_bench.trajectory import Trajectory

OUT = Path(__file__).parent / "out" / "weights.json"
CACHE = Path.home() / ".cache" / "etude" / "bench"


def main() -> None:
    """Print the tables and the targets, and write bench/out/weights.json."""
    options = _options()
    load = os.getloadavg()[0]
    clock.settle()
    processor = None if options.tiny else clock.pin()
    repeats = 1 if options.tiny else options.repeats
    screen = Console(width=None if os.isatty(1) else 200)
    chosen = sources.tiny() if options.tiny else sources.full(options.pretraining_steps)
    found: dict[str, Any] = {}
    claims = _tables(screen, sources.claimed(chosen, options.cache), found, repeats)
    _tables(screen, sources.others(chosen, options.cache, options.run), found, repeats)
    result: dict[str, Any] = figures.wire_figures(list(claims.values()))
    middle = sources.middle(chosen, options.cache)
    result |= figures.default_figures(claims[middle.name])
    if not options.tiny:
        from weights_bench import pause  # noqa: PLC0415 - vLLM takes seconds

        costs = pause.costs(middle, repeats=repeats)
        screen.print(report.pause_table(costs))
        result |= figures.pause_figures(costs)
        result["pause"] = {name: each._asdict() for name, each in costs.items()}
    for line in report.verdicts(result):
        screen.print(line, highlight=False)
    screen.print(f"load average {load:.2f} before, {os.getloadavg()[0]:.2f} after")
    result |= {"load_average": load, "processor": processor, "trajectories": found}
    options.out.parent.mkdir(exist_ok=True)
    options.out.write_text(json.dumps(result, indent=2) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, default=CACHE, help="where trajectories are kept")
    parser.add_argument("--run", type=Path, help="a run's folder: its newest delta is measured too")
    parser.add_argument("--pretraining-steps", type=int, default=300, help="of trajectory B")
    parser.add_argument("--repeats", type=int, default=3, help="of which the best counts")
    parser.add_argument("--tiny", action="store_true", help="check the bench itself, in seconds")
    parser.add_argument("--out", type=Path, default=OUT)
    return parser.parse_args()


def _tables(
    screen: Console, trajectories: Iterable[Trajectory], found: dict[str, Any], repeats: int
) -> dict[str, Rows]:
    """Measure everything on each trajectory; print a table each, and keep it in found."""
    tables: dict[str, Rows] = {}
    for trajectory in trajectories:
        copied = measure.memcpy(trajectory, repeats=repeats)
        rows = {
            each.name: measure.measure(each, trajectory, copied, repeats=repeats)
            for each in CONTENDERS
        }
        least = bound.bits_per_change(trajectory)
        share = trajectory.changed / trajectory.elements
        title = f"\n{trajectory.name}: {trajectory.num_bytes / 1e6:,.1f} MB, {share:.3%} changed"
        screen.print(report.codec_table(title, rows, least, copied))
        found[trajectory.name] = _entry(trajectory, rows) | {
            "bound_bits_per_change": least,
            "memcpy": copied._asdict(),
        }
        tables[trajectory.name] = rows
    return tables


def _entry(trajectory: Trajectory, rows: Rows) -> dict[str, Any]:
    return {
        "facts": dict(trajectory.facts),
        "num_bytes": trajectory.num_bytes,
        "elements": trajectory.elements,
        "changed": trajectory.changed,
        "codecs": {name: asdict(row) for name, row in rows.items()},
    }


if __name__ == "__main__":
    main()
