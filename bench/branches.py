"""Branches of tenants: promoted where they gain on their own tasks and lose nothing on others'.

python bench/branches.py [--windows N] [--seeds N]

Two tenants train a branch of one parent, each on its own windows alone. Users of one have another
taste in their own tasks; those of the other also in tasks of everyone. Users, policy (a table) and
suites are simulated; events, windows, credit, gradient, comparison and decision are the product's.
Exits with 1 if the first branch is stopped by the gate, or if the second one passes it.

Examples:
  make bench-branches
  python bench/branches.py --seeds 1   a first look
"""

import argparse
import sys
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))  # the simulation is that of the tests

from tests.support import figures
from tests.support.feedback.branch_simulation import (
    HURRIED,
    PARTICULAR,
    BranchResult,
    BranchSimulation,
)

from etude.common.evaluation.comparison import PairedDifference
from etude.feedback.release.decision import ReleaseAction

BRANCHES = {
    "another taste in own tasks": (PARTICULAR, ReleaseAction.START),
    "another taste in everyone's tasks too": (HURRIED, ReleaseAction.REFUSE),
}
"""Taste of a tenant's users, and the decision about its branch."""


def describe(found: PairedDifference) -> str:
    """Difference to the parent, in points, with both bounds."""
    low, high = 100 * found.low, 100 * found.high
    return f"{100 * found.difference:+.1f} [{low:+.1f}, {high:+.1f}]"


def main() -> None:
    """Print the table and write bench/out/branches.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    table = Table("branch of users with", "seed", "own suite", "general suite", "gate", "rollouts")
    wrong: list[str] = []
    results: list[BranchResult] = []
    for seed in range(options.seeds):
        for name, (taste, expected) in BRANCHES.items():
            found = BranchSimulation(taste, np.random.default_rng(seed)).run(options.windows)
            results.append(found)
            audit = found.audit
            counts = f"{audit.num_trained} trained, {audit.masked['OtherTenant']} left out"
            is_passed = found.decision.action is ReleaseAction.START
            verdict = "passed" if is_passed else "refused"
            row = (name, str(seed), describe(found.own), describe(found.general), verdict, counts)
            table.add_row(*row)
            if found.decision.action is not expected or audit.findings:
                wrong.append(f"{name}, seed {seed}: {found.decision.sentence}")
    Console(width=140).print(table)
    for found in results[:2]:
        Console(width=140).print(found.decision.sentence)
    figures.record(
        "branches",
        promoted=sum(each.decision.action is ReleaseAction.START for each in results),
        refused=sum(each.decision.action is ReleaseAction.REFUSE for each in results),
        own_gain=round(min(each.own.difference for each in results), 4),
        general_loss=round(-min(each.general.difference for each in results), 4),
        others_trained=sum(
            finding.invariant == "tenant" for each in results for finding in each.audit.findings
        ),
    )
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
