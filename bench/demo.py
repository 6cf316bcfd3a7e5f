"""The demo's gains and stages, from a run of it: python bench/demo.py [--run runs/demo]."""

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from etude.cli.demo.result import FIRST_STEP_S, TOTAL_S
from etude.cli.demo.stopwatch import Stopwatch, read_stopwatch
from etude.cli.process_usage import read_measurements
from etude.common.run_folder.record import FolderRecord, latest_rows

OUT = Path(__file__).parent / "out" / "demo.json"


def ratios(figures: dict[str, float]) -> dict[str, float]:
    """What the demo claims, as one number each: above 1 is better, for times below 1."""

    def gain(after: str, before: str) -> float:
        return figures[after] / figures[before] if figures[before] else math.inf

    return {
        "held-out T=1, after / before": gain("held_out_after", "held_out_before"),
        "held-out greedy, after / before": gain("greedy_after", "greedy_before"),
        "training reward, last 10 / first 5": gain("reward_last", "reward_first"),
        "first optimiser step / 120 s": figures["first_step_s"] / FIRST_STEP_S,
        "total / 600 s": figures["total_s"] / TOTAL_S,
    }


def stages(rows: Sequence[dict[str, Any]], times: Stopwatch) -> dict[str, float]:
    """Seconds to the first step, of each phase without its evaluations, and of all of these."""
    moments = [r for r in rows if r["kind"] in {"step", "eval", "version"}]
    first = next(r for r in moments if r["kind"] == "step")
    found = {"start": times.seconds_before(first["time_s"])}
    before = found["start"]
    for row in moments[moments.index(first) :]:
        now = times.seconds_before(row["time_s"])
        stage = "evaluations" if row["kind"] == "eval" else row.get("phase", "versions")
        found[stage] = found.get(stage, 0.0) + max(0.0, now - before)
        before = max(before, now)
    return {**found, "end": times.total_s - before}


def cpu_by_phase(
    rows: Sequence[dict[str, Any]], measurements: Sequence[dict[str, Any]]
) -> dict[str, dict[str, float]]:
    """CPU-seconds of each role in each phase, from the measurements of the run's processes.

    "start" lasts until the first optimiser step. "other" is the local runtime, the command that
    watches it, and jobs that verify and delete checkpoints: processes too short-lived to be a role.
    """
    steps = [(float(row["time_s"]), str(row["phase"])) for row in rows if row["kind"] == "step"]
    table: dict[str, dict[str, float]] = {}
    for before, after in pairwise(measurements):
        end = float(after["time_s"])
        phase = next((phase for time_s, phase in steps if time_s >= end), steps[-1][1])
        used = _used(before, after)
        column = table.setdefault("start" if end < steps[0][0] else phase, {})
        for role, seconds in used.items():
            column[role] = column.get(role, 0.0) + seconds
    return table


def _used(before: dict[str, Any], after: dict[str, Any]) -> dict[str, float]:
    """CPU-seconds of each role between two measurements; a restarted role begins at zero."""
    used = {}
    for role, now in after["roles"].items():
        earlier = before["roles"].get(role, {}).get("cpu_s", 0.0)
        used[role] = now["cpu_s"] - earlier if now["cpu_s"] >= earlier else now["cpu_s"]
    total = after["total"]["cpu_s"] - before["total"]["cpu_s"]
    return {**used, "other": max(0.0, total - sum(used.values()))}


def print_cpu(table: dict[str, dict[str, float]]) -> None:
    """Print CPU-seconds by role and phase."""
    roles = sorted({role for column in table.values() for role in column})
    print(f"\n{'CPU-seconds':16}" + "".join(f"{phase:>10}" for phase in (*table, "all")))
    for role in (*roles, "all"):
        names = roles if role == "all" else [role]
        cells = [sum(column.get(name, 0.0) for name in names) for column in table.values()]
        print(f"  {role:14}" + "".join(f"{cell:10,.1f}" for cell in (*cells, sum(cells))))


def main() -> None:
    """Run the demo unless it has been run; print its figures, and write bench/out/demo.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, default=Path("runs/demo"))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    run = options.run
    # A run that is complete is only judged anew; whether it misses a target is the demo's business.
    # An older verdict goes first: else it would stand for a run that failed.
    verdict = run / "demo.json"
    verdict.unlink(missing_ok=True)
    code = "from etude.cli.main import main; main()"
    command = [sys.executable, "-c", code, "demo", "--seed", str(options.seed), "--dir", str(run)]
    done = subprocess.run(command, check=False)
    if not verdict.is_file():
        sys.exit(done.returncode or 1)
    figures = json.loads(verdict.read_text())
    rows = [dict(row) for row in latest_rows(FolderRecord(run).rows())]
    measurements = read_measurements(run)
    times = read_stopwatch(run, [float(row["time_s"]) for row in (*rows, *measurements)])
    spent = stages(rows, times)
    for title, table in {"ratio": ratios(figures), "stage, seconds": spent}.items():
        print(f"\n{title}")
        for name, value in table.items():
            print(f"  {name:36} {value:10,.2f}")
    cpu_s = cpu_by_phase(rows, measurements)
    print_cpu(cpu_s)
    OUT.parent.mkdir(exist_ok=True)
    seconds = {f"stage_{name}_s": value for name, value in spent.items()}
    OUT.write_text(json.dumps({**figures, **seconds, "cpu_s": cpu_s}, indent=2) + "\n")


if __name__ == "__main__":
    main()
