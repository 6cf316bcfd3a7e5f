"""The operator killed before and after every one of its writes, in three workloads."""

import random

import pytest
from tests.operator_faults import crash_plans
from tests.operator_faults.crash_plans import Plan
from tests.operator_faults.lab import Lab
from tests.operator_faults.workloads import WORKLOADS, Workload
from tests.support import figures

SAMPLE = 4
"""Plans of a workload that every change waits for."""

PLANNED: dict[str, int] = {}
REACHED: dict[str, int] = {}

workloads = pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)


@workloads
async def test_p03_an_operator_killed_at_some_of_its_writes_reaches_the_same_end(
    lab: Lab, workload: Workload
) -> None:
    reference = await crash_plans.record(lab, workload)
    drawn = random.Random(0).sample(crash_plans.plans(reference.writes), SAMPLE)
    outcomes = await crash_plans.attempt_all(lab, workload, drawn, reference)
    assert not [str(each) for each in outcomes if each.problems]


@pytest.mark.long
@pytest.mark.timeout(5_400)
@workloads
async def test_p03_an_operator_killed_before_and_after_each_write_reaches_the_same_end(
    lab: Lab, workload: Workload
) -> None:
    reference = await crash_plans.record(lab, workload)
    assert reference.writes > 5, "a workload that hardly writes shows nothing"
    planned: list[Plan] = crash_plans.plans(reference.writes)
    outcomes = await crash_plans.attempt_all(lab, workload, planned, reference)
    reached = [each for each in outcomes if not each.problems]
    _record(workload.name, len(reached), len(planned))
    print(f"{workload.name}: {len(reached)} of {len(planned)} reach the reference state")  # noqa: T201
    assert not [str(each) for each in outcomes if each.problems]


def _record(workload: str, reached: int, planned: int) -> None:
    """The figures of the workloads that were tried so far, and their sum."""
    PLANNED[workload], REACHED[workload] = planned, reached
    each = {name: f"{REACHED[name]} of {PLANNED[name]}" for name in sorted(PLANNED)}
    figures.record(
        "faults",
        crash_plans=sum(PLANNED.values()),
        reached_reference=sum(REACHED.values()),
        crash_workloads=[f"{name}: {words}" for name, words in each.items()],
    )
