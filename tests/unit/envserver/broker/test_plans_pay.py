"""A whole run's plans, from the trainer's forecast to what a node has ready when a wave comes."""

from collections.abc import Callable
from random import Random
from typing import NamedTuple

import pytest

from etude.common.plans.registry import PlanRegistry
from etude.envserver.broker.hosts import HostState
from etude.envserver.broker.start_costs import TemplateReadiness
from etude.envserver.broker.warm_targets import WarmTargets
from etude.trainer.controller.admission.forecast import WaveForecast
from etude.v1 import environments_pb2

SIBLINGS, WAVES, STEP_S = 64, 60, 100.0
LEARNING = 5
"""Waves before there is a rhythm to go by."""
REFILL_PER_S = 20
"""Clones that the node starts each second while it has nothing else to do."""
DURATIONS: dict[str, Callable[[Random], float]] = {
    "lognormal": lambda random: STEP_S * random.lognormvariate(0.0, 0.1),
    "Pareto": lambda random: 0.8 * STEP_S * random.paretovariate(5.0),
}


class Outcome(NamedTuple):
    """What a run saw of its pool."""

    warm: float
    """Share of environments that found a clone ready."""
    idle_s: float
    """Clone-seconds that nobody used, per wave."""


def trained(duration: Callable[[Random], float], *, is_planned: bool) -> Outcome:
    """One run of many waves on one node, second by second."""
    random, forecast, warming = Random(5), WaveForecast(), WarmTargets(PlanRegistry({"python"}))
    node = HostState(node_id="n", slots=256, readiness_by_template={"python": TemplateReadiness()})
    warm = idle = clock = 0
    for wave in range(WAVES):
        ends = clock + duration(random)
        while clock < ends:
            clock += 1
            targets = warming.targets([node], now_s=float(clock)).get("n", [])
            wanted = sum(target.paused_clones for target in targets)
            level = node.readiness_by_template["python"]
            level.paused_clones = min(wanted, level.paused_clones + REFILL_PER_S)
            idle += level.paused_clones
        found = min(SIBLINGS, node.readiness_by_template["python"].paused_clones)
        warm += found if wave >= LEARNING else 0
        node.readiness_by_template["python"].paused_clones -= found
        warming.record_launch(
            environments_pb2.LaunchBatchRequest(run_id="r", group_id="g", template="python"),
            "python",
            SIBLINGS,
        )
        forecast.record_wave(float(clock))
        plan = forecast.plan(
            [{"python": SIBLINGS}] * 3, now_s=float(clock), now_unix_ms=1000 * clock
        )
        if plan.waves and is_planned:
            for each in plan.waves:
                each.pool, each.template = "", "python"
            warming.plans.report("r", plan, now_s=float(clock))
    after_s = clock + 10 * STEP_S
    assert warming.targets([node], now_s=after_s) == {}, "a run that is over holds nothing"
    return Outcome(warm / SIBLINGS / (WAVES - LEARNING), idle / WAVES)


@pytest.mark.parametrize("shape", sorted(DURATIONS))
def test_most_environments_of_a_planned_run_find_a_clone_ready(shape: str) -> None:
    planned = trained(DURATIONS[shape], is_planned=True)

    assert planned.warm >= 0.85
    # Keeping as many ready all the time is what it would cost to find every one.
    assert planned.idle_s <= 0.75 * SIBLINGS * STEP_S


def test_without_plans_nothing_is_kept_ready_for_waves() -> None:
    assert trained(DURATIONS["lognormal"], is_planned=False) == Outcome(0.0, 0.0)
