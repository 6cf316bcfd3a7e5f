"""The operator killed before and after its writes, in three workloads.

ETUDE_CRASH_PLANS is the share of all plans that is tried, 1 for each; `make test-operator` sets it.
Without it a few are, which every change waits for. SEED says which.
"""

import math
import os
import random
import sys
from collections.abc import Sequence

import pytest
from tests.operator_faults import crash_plans, journal
from tests.operator_faults.crash_plans import Outcome, Plan
from tests.operator_faults.journal import Journal
from tests.operator_faults.lab import Lab
from tests.operator_faults.workloads import WORKLOADS, Workload
from tests.support import figures

SHARE = os.environ.get("ETUDE_CRASH_PLANS", "")
SEED = int(os.environ.get("SEED", "0"))
FEW = 4
FOLDER = figures.OUT / "crash_plans"

PLANNED: dict[str, int] = {}
REACHED: dict[str, int] = {}

workloads = pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)


@pytest.mark.skipif(bool(SHARE), reason="more of them are tried below")
@workloads
async def test_p03_an_operator_killed_at_some_of_its_writes_reaches_the_same_end(
    lab: Lab, workload: Workload
) -> None:
    reference = await crash_plans.record(lab, workload)
    drawn = random.Random(SEED).sample(crash_plans.plans(reference.writes), FEW)
    outcomes: list[Outcome] = []
    await crash_plans.attempt_all(lab, workload, drawn, reference, outcomes.append)
    assert len(outcomes) == FEW
    assert not [str(each) for each in outcomes if each.problems]


@pytest.mark.skipif(not SHARE, reason="ETUDE_CRASH_PLANS says which share of them is tried")
@pytest.mark.long
@pytest.mark.timeout(14_400)
@workloads
async def test_p03_an_operator_killed_before_and_after_each_write_reaches_the_same_end(
    lab: Lab, workload: Workload
) -> None:
    kept = Journal.of(FOLDER, workload.name, journal.code())
    if kept.reference is None:
        kept.begin(await crash_plans.record(lab, workload))
    assert kept.reference is not None
    assert kept.reference.writes > 5, "a workload that hardly writes shows nothing"
    planned = _drawn(kept.reference.writes)
    left = [plan for plan in planned if plan not in kept.reached]
    _say(f"{workload.name}: {len(planned)} plans, {len(planned) - len(left)} known from before")
    failed: list[str] = []

    def tell(outcome: Outcome) -> None:
        kept.add(outcome)
        failed.extend([str(outcome)] * bool(outcome.problems))
        done = len(kept.reached.intersection(planned))
        _say(f"{workload.name}: {done} of {len(planned)}, {len(failed)} failed; {outcome}")
        _record(workload.name, done, len(planned))

    await crash_plans.attempt_all(lab, workload, left, kept.reference, tell)
    done = len(kept.reached.intersection(planned))
    _record(workload.name, done, len(planned))
    _say(f"{workload.name}: {done} of {len(planned)} reach the reference state")
    assert not failed


def _drawn(writes: int) -> Sequence[Plan]:
    every = crash_plans.plans(writes)
    return random.Random(SEED).sample(every, math.ceil(float(SHARE) * len(every)))


def _say(words: str) -> None:
    """Progress, which pytest shows with -s: all plans take the better part of an hour.

    Not to the standard output, which belongs to xdist in its processes.
    """
    print(words, file=sys.stderr, flush=True)  # noqa: T201


def _record(workload: str, reached: int, planned: int) -> None:
    """The figures of the workloads that were tried so far, and their sum."""
    PLANNED[workload], REACHED[workload] = planned, reached
    each = {name: f"{REACHED[name]} of {PLANNED[name]}" for name in sorted(PLANNED)}
    figures.record(
        "faults",
        crash_plans=sum(PLANNED.values()),
        reached_reference=sum(REACHED.values()),
        crash_plans_seed=SEED,
        crash_workloads=[f"{name}: {words}" for name, words in each.items()],
    )
