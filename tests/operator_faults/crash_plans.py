"""Plans that kill the operator at its k-th write, and what became of them."""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.operator_faults import oracles
from tests.operator_faults.faults import Kill
from tests.operator_faults.lab import LIMIT_S, Lab
from tests.operator_faults.oracles import Reference
from tests.operator_faults.workloads import Workload
from typing_extensions import override

QUIET_S = 3.0
"""A run without faults is over once nothing has changed for so long: six status paces."""
AT_ONCE = 6
TRIES = 5
"""Lives that may pass without the write of a plan: how many tell of moving figures is a matter of
timing."""


class Plan(NamedTuple):
    """Kill at one write."""

    at: int
    is_before: bool

    @override
    def __str__(self) -> str:
        return f"{'before' if self.is_before else 'after'} write {self.at}"


@dataclass(slots=True)
class Outcome:
    """What one plan came to."""

    plan: Plan
    fired: str = ""
    problems: list[str] = field(default_factory=list)

    @override
    def __str__(self) -> str:
        return "\n  ".join([f"killed {self.plan} ({self.fired or 'never'})", *self.problems[:12]])


async def record(lab: Lab, workload: Workload, times: int = 2) -> Reference:
    """What a workload comes to without a fault."""
    runs = await asyncio.gather(*(_recorded(lab, workload) for _ in range(times)))
    return oracles.reference(
        [run.state for run in runs],
        [run.digest for run in runs],
        min(run.writes for run in runs),
    )


async def _recorded(lab: Lab, workload: Workload) -> Reference:
    async with lab.scene() as scene, lab.acting(scene) as operator:
        counter = Kill(at=-1, is_before=False, pid=lambda: 0)
        await workload.prepare(scene)
        operator.proxy.faults.append(counter)
        counter.is_armed = True
        await workload.act(scene)
        await scene.scenery.quiet(QUIET_S)
        assert not scene.problems(), scene.problems()
        state = oracles.state(scene.scenery.objects)
        made = oracles.digest(scene.scenery.ordered())
        return Reference(state, frozenset(), made, counter.seen)


async def attempt(lab: Lab, workload: Workload, plan: Plan, reference: Reference) -> Outcome:
    """Carry one plan out."""
    outcome = Outcome(plan)
    async with (
        lab.scene() as scene,
        lab.acting(scene) as operator,
        asyncio.TaskGroup() as tasks,
    ):
        await workload.prepare(scene)
        kill = Kill(plan.at, plan.is_before, lambda: operator.pid)
        operator.proxy.faults.append(kill)
        operator.keep(tasks)
        kill.is_armed = True
        try:
            async with asyncio.timeout(LIMIT_S):
                await workload.act(scene)
                await scene.scenery.until(lambda: not reference.differences(scene.scenery.objects))
        except TimeoutError:
            outcome.problems += ["it does not reach the reference state"]
            outcome.problems += reference.differences(scene.scenery.objects)
            outcome.problems += scene.log().splitlines()[-5:]
        operator.unkeep()
        outcome.fired = kill.fired
        outcome.problems += reference.excess(scene.scenery.ordered())
        outcome.problems += scene.problems()
    if not kill.fired:
        outcome.problems.append(f"only {kill.seen} writes were seen")
    return outcome


async def attempt_all(
    lab: Lab,
    workload: Workload,
    plans: Iterable[Plan],
    reference: Reference,
    tell: Callable[[Outcome], None],
) -> None:
    """Carry plans out, a few at once, and tell of each as soon as it is over."""
    turns = asyncio.Semaphore(AT_ONCE)

    async def one(plan: Plan) -> None:
        async with turns:
            found = await attempt(lab, workload, plan, reference)
            for _ in range(TRIES - 1):
                if not found.fired:
                    found = await attempt(lab, workload, plan, reference)
            tell(found)

    async with asyncio.TaskGroup() as group:
        for plan in plans:
            group.create_task(one(plan), name=f"plan {plan}")


def plans(count: int) -> list[Plan]:
    """Every write, each in both ways."""
    return [Plan(at, is_before) for at in range(1, count + 1) for is_before in (False, True)]
