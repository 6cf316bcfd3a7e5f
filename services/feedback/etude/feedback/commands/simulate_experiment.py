"""`python -m etude.feedback.commands.simulate_experiment`: power of an experiment, simulated."""

import argparse
import json
import sys
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from etude.feedback.experiments.simulation import (
    OperatingCharacteristics,
    Population,
    draw_experiments,
    try_msprt,
    try_spending,
)

SPENDING, MSPRT = "alpha spending", "mSPRT"
MIN_USERS_PER_LOOK = 200


def main() -> None:
    """Print what each rule of stopping would do, as a table or as JSON.

    Raises:
        SystemExit: with 4 if a figure is out of its range; the problem is printed.
    """
    options = _options()
    problem = find_problem(options)
    if problem is not None:
        sys.stderr.write(f"{problem}  [InvalidArgument]\n")
        raise SystemExit(4)
    rules = simulate(options)
    if options.json:
        rows = {name: asdict(each) for name, each in rules.items()}
        sys.stdout.write(json.dumps(vars(options) | {"rules": rows}) + "\n")
        return
    table = Table("rule", "power", "false positives", "users an arm at the decision (median)")
    for name, each in rules.items():
        median = "-" if each.median_users is None else f"{each.median_users:,}"
        table.add_row(name, f"{each.power:.1%}", f"{each.false_positives:.1%}", median)
    console = Console(highlight=False)
    console.print(
        f"base {options.base:g}, effect {options.effect:+g}, {options.users:,} users an arm,"
        f" {options.looks} looks, {options.events:g} events a user,"
        f" {options.repeats:,} simulated experiments",
        soft_wrap=True,
    )
    console.print(table)


def find_problem(options: argparse.Namespace) -> str | None:
    """Name the first figure that is out of its range, or return None."""
    better = options.base + options.effect
    ranges = (
        ("--base", options.base, 0 < options.base < 1, "between 0 and 1"),
        ("--effect", options.effect, options.effect != 0, "other than 0"),
        ("--base plus --effect", better, 0 < better < 1, "between 0 and 1"),
        ("--looks", options.looks, 1 <= options.looks <= 200, "from 1 to 200"),
        (
            "--users",
            options.users,
            options.looks * MIN_USERS_PER_LOOK <= options.users <= 1_000_000,
            f"from {MIN_USERS_PER_LOOK} a look to 1,000,000",
        ),
        ("--events", options.events, 1 <= options.events <= 10, "from 1 to 10"),
        ("--correlation", options.correlation, 0 <= options.correlation < 1, "from 0 to below 1"),
        ("--alpha", options.alpha, 0 < options.alpha < 1, "between 0 and 1"),
        ("--repeats", options.repeats, 100 <= options.repeats <= 100_000, "from 100 to 100,000"),
    )
    for name, value, is_valid, limits in ranges:
        if not is_valid:
            return f"{name}  is {value:g}\n  fix: give a number {limits}"
    return None


def simulate(options: argparse.Namespace) -> dict[str, OperatingCharacteristics]:
    """Try both rules on the same simulated experiments, looked at after equal numbers of users."""
    users = tuple(
        round(options.users * look / options.looks) for look in range(1, options.looks + 1)
    )
    draws = draw_experiments(
        Population(events_per_user=options.events, correlation=options.correlation),
        (options.base, options.base + options.effect),
        users,
        options.repeats,
        seed=options.seed,
    )
    return {
        SPENDING: try_spending(draws, options.users, options.alpha),
        MSPRT: try_msprt(draws, abs(options.effect), options.alpha),
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", type=float, required=True, help="rate of success of stable")
    parser.add_argument("--effect", type=float, required=True, help="absolute difference")
    parser.add_argument("--users", type=int, required=True, help="of each arm")
    parser.add_argument("--looks", type=int, default=5)
    parser.add_argument("--events", type=float, default=1.0, help="mean of a user")
    parser.add_argument("--correlation", type=float, default=0.0, help="of events of one user")
    parser.add_argument("--alpha", type=float, default=0.05)
    parser.add_argument("--repeats", type=int, default=2_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
