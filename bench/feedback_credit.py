"""Credit of users' feedback on simulated users with a known truth.

python bench/feedback_credit.py [--edits N] [--seeds N]

Persistence: edits of which 30 % are not looked at up to the horizon, estimated with and without
weights for what was not seen; then with users who leave because of a bad edit, whose bias no weight
removes. Poisoning: 10 of 400 users praise one direction of the policy as much as they can. Their
part of the window's absolute advantages is at most their cap; the gradient of a linear policy is
displaced by that part of the distance to their direction, and by what they shift in the others'.
They also pull the mean advantage of the others below 0.
Exits with 1 if an estimate is more than 0.01 off, if the users' part is above their cap, if the
shift is above a fiftieth of it, or if the pull is above a tenth of the mean absolute advantage.

Examples:
  make bench-credit
  python bench/feedback_credit.py --edits 2000 --seeds 1   a first look
"""

import argparse
import itertools
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))  # the simulation is that of the tests

from tests.support import figures
from tests.support.feedback.credit_simulation import simulate_persistence, simulate_poisoning

LARGEST_ERROR = 0.01
LARGEST_SHIFT = 0.02
"""Change of the others' part of the gradient, as a part of the cap."""
LARGEST_PULL = 0.1
"""Change of the others' mean advantage, as a part of their mean absolute one."""
SIGNALS = (1, 8)
"""Signals by which the users praise."""


def measure_persistence(num_edits: int, seeds: int) -> dict[str, float]:
    """Errors of the estimates, the largest over the seeds."""
    table = Table("users leave", "truth", "weighted", "seen to the end", "no news is good")
    found: dict[str, float] = {}
    for name, leave_after_loss in (("by chance", 0.0), ("after bad edits", 0.2)):
        runs = [
            simulate_persistence(
                num_edits, censored=0.3, leave_after_loss=leave_after_loss, seed=seed
            )
            for seed in range(seeds)
        ]
        table.add_row(name, *(f"{value:.3f}" for value in runs[0]))
        errors = [run.estimate - run.truth for run in runs]
        largest = max(errors) if max(errors) > -min(errors) else min(errors)
        found[f"error_{name.replace(' ', '_')}"] = round(largest, 4)
    Console().print(table)
    return found


def measure_poisoning(seeds: int) -> dict[str, float]:
    """Parts of colluding users, the largest over the seeds."""
    names = ("weight", "displacement", "shift", "pull")
    table = Table("rollouts each", "signals", "cap", *names, "without weights")
    found = {f"colluding_{name}": 0.0 for name in names} | {"excess": -1.0}
    for rollouts_each, num_signals in itertools.product((1, 5, 100), SIGNALS):
        runs = [
            simulate_poisoning(
                num_users=400,
                num_colluding=10,
                rollouts_each=rollouts_each,
                seed=seed,
                num_signals=num_signals,
            )
            for seed in range(seeds)
        ]
        for run in runs:
            for name in names:
                key = f"colluding_{name}"
                found[key] = max(found[key], getattr(run, name))
            shift = max(run.shift - LARGEST_SHIFT * run.cap, run.pull - LARGEST_PULL)
            found["excess"] = max(found["excess"], run.weight - run.cap, shift)
        first = runs[0]
        values = (first.cap, *(getattr(first, name) for name in names), first.uncapped)
        row = (str(rollouts_each), str(num_signals), *(f"{value:.2%}" for value in values))
        table.add_row(*row)
    Console().print(table)
    return {name: round(value, 4) for name, value in found.items()}


def main() -> None:
    """Print the tables and write bench/out/credit.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--edits", type=int, default=20_000)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    found = measure_persistence(options.edits, options.seeds) | measure_poisoning(options.seeds)
    figures.record("credit", **found)
    if abs(found["error_by_chance"]) > LARGEST_ERROR:
        sys.exit(f"goal: persistence within {LARGEST_ERROR} of the truth")
    if found["excess"] > 0:
        sys.exit("goal: colluding users within their cap")


if __name__ == "__main__":
    main()
