"""Rules of stopping an A/B test of two checkpoints: false positives and power, simulated.

python bench/ab_power.py [--repeats N] [--seed N]

The metric is 0.6 on the stable checkpoint, and 2.28 % higher on a candidate that is better. Rules
see the same experiments: the product's alpha spending and mSPRT, the classic O'Brien-Fleming bounds
at equal looks, and a z-test that is looked at again and again. `one event`: a user has one event.
`clusters`: a geometric number with mean 5, and 0.2 of correlation between the events of one user.
`delayed`: such users count 8 % of the horizon after they came, when their outcome is known. The
first look has 400 users, others 1,000 more each, and the last one, which comes when all outcomes
are known, has 1.09 of the planned information. False positives count on both sides.
It takes half a minute of one core.

Examples:
  make bench-ab                              the table, and its file
  python bench/ab_power.py --repeats 400      a first look
"""

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from etude.feedback.experiments.simulation import (
    Draws,
    OperatingCharacteristics,
    Population,
    draw_experiments,
    try_limits,
    try_msprt,
    try_spending,
)

OUT = Path(__file__).parent / "out" / "ab.json"
SPENDING = "alpha spending"
ALPHA = 0.05
BASE, EFFECT = 0.6, 0.6 * 0.0228
STEP_USERS = 200
"""Of an arm, between the closest looks."""
CLASSIC = {5: 2.040, 20: 2.13, 100: 2.18}
"""By equal looks: c of the bounds c / √(k/K) on |z|, for alpha 0.05 on both sides."""
GOAL_USERS = 20_000
CLUSTERS = Population(events_per_user=5, correlation=0.2)
DELAYED_LOOKS = (*range(1, 87, 5), 99)
"""After 400, 1,400 … 17,400 and all 20,000 users, as indices of steps."""
DELAYED_PLAN = 18_400
ERROR_RATE, ERROR_EFFECT, ERROR_ALPHA = 0.02, 0.01, 0.01
"""A guardrail, and alpha on both sides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One rule on one kind of experiment."""

    users: str
    horizon: int
    looks: int
    rule: str
    result: OperatingCharacteristics


def main() -> None:
    """Print the table and write bench/out/ab.json."""
    options = _options()
    began_s = time.process_time()
    rows = list(_rows(options.repeats, options.seed))
    spending = [row for row in rows if row.rule == SPENDING]
    at_goal = [row for row in spending if row.horizon == GOAL_USERS]
    figures: dict[str, Any] = {
        "aa_false_positive": max(row.result.false_positives for row in spending),
        "power_20k": min(row.result.power for row in at_goal),
        "guardrail": asdict(_guardrail(options.repeats, options.seed)),
        "rows": [asdict(row) for row in rows],
        "repeats": options.repeats,
        "seed": options.seed,
        "cpu_s": round(time.process_time() - began_s, 1),
    }
    _print(rows, figures)
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps(figures, indent=1) + "\n")


def _rows(repeats: int, seed: int) -> Iterator[Row]:
    users = tuple(range(STEP_USERS, 2 * GOAL_USERS + 1, STEP_USERS))
    rates = (BASE, BASE + EFFECT)
    for name, population in (("one event", Population()), ("clusters", CLUSTERS)):
        draws = draw_experiments(population, rates, users, repeats, seed=seed)
        for horizon, looks in ((20_000, 5), (20_000, 20), (20_000, 100), (40_000, 20)):
            for rule, result in _even(draws, horizon, looks).items():
                yield Row(users=name, horizon=horizon, looks=looks, rule=rule, result=result)
        if population is CLUSTERS:
            looks = len(DELAYED_LOOKS)
            for rule, result in _delayed(draws.select(DELAYED_LOOKS)).items():
                yield Row(users="delayed", horizon=20_000, looks=looks, rule=rule, result=result)


def _even(draws: Draws, horizon: int, looks: int) -> dict[str, OperatingCharacteristics]:
    step = horizon // STEP_USERS // looks
    seen = draws.select(range(step - 1, horizon // STEP_USERS, step))
    classic = [CLASSIC[looks] / math.sqrt((k + 1) / looks) for k in range(looks)]
    return {
        SPENDING: try_spending(seen, horizon, ALPHA),
        "classic O'Brien-Fleming": try_limits(seen, classic),
        "mSPRT": try_msprt(seen, EFFECT, ALPHA),
        "peeking": try_limits(seen, [1.96] * looks),
    }


def _delayed(draws: Draws) -> dict[str, OperatingCharacteristics]:
    return {
        SPENDING: try_spending(draws, DELAYED_PLAN, ALPHA),
        "mSPRT": try_msprt(draws, EFFECT, ALPHA),
    }


def _guardrail(repeats: int, seed: int) -> OperatingCharacteristics:
    """An error rate that rises by half, watched every 200 users up to 6,000."""
    users = tuple(range(STEP_USERS, 6_001, STEP_USERS))
    rates = (ERROR_RATE, ERROR_RATE + ERROR_EFFECT)
    draws = draw_experiments(Population(), rates, users, repeats, seed=seed)
    return try_msprt(draws, ERROR_EFFECT, ERROR_ALPHA)


def _print(rows: list[Row], figures: dict[str, Any]) -> None:
    table = Table("users", "horizon", "looks", "rule", "A/A", "power", "median stop")
    for row in rows:
        result = row.result
        table.add_row(
            row.users,
            f"{row.horizon:,}",
            str(row.looks),
            row.rule,
            f"{result.false_positives:.1%}",
            f"{result.power:.1%}",
            "-" if result.median_users is None else f"{result.median_users:,}",
        )
    console = Console()
    console.print(table)
    console.print(
        f"Alpha spending: A/A at most {figures['aa_false_positive']:.1%} (goal 6 %), power at"
        f" {GOAL_USERS:,} users an arm at least {figures['power_20k']:.1%} (goal 75 %)."
        f" Guardrail: {figures['guardrail']}. {figures['cpu_s']} CPU seconds"
    )


def _options() -> argparse.Namespace:
    what, _, examples = __doc__.partition("\nExamples:\n")
    parser = argparse.ArgumentParser(
        description=what,
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--repeats", type=int, default=4_000)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
