"""Convergence of decisions that are carried out."""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from etude.common.api.pool.autoscaling import ScaleToZero, ZeroMode
from etude.common.plans.forecast import Quantile, Wave
from etude.operator.pools.autoscaling.config import PoolScalingConfig, ScalingParameters
from etude.operator.pools.autoscaling.provisioning import ProvisionTime, estimate_provision
from etude.operator.pools.autoscaling.values import DemandPlan

MakeLoop = Callable[..., Any]
TAKES_S, TICK_S, DELAY_S = 20.0, 2.0, 120.0
CONFIG = PoolScalingConfig(max_replicas=1_000)
ZERO = PoolScalingConfig(
    max_replicas=1_000,
    autoscaling=ScalingParameters(scale_to_zero=ScaleToZero(mode=ZeroMode.WHEN_IDLE)),
)
# The fixture holds no state: it hands out a class.
laws = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def step(before: int, after: int, at_s: float) -> Callable[[float], int]:
    return lambda now_s: before if now_s < at_s else after


@laws
@given(st.integers(4, 16), st.floats(2.0, 7.9))
def test_a_step_that_is_panic_is_served_after_the_lead_time_and_two_ticks(
    make_loop: MakeLoop, before: int, factor: float
) -> None:
    # From twice of what the replicas can serve; the pool grows tenfold at most, 200 at once.
    after = int(factor * math.ceil(before / 0.8))
    loop = make_loop(CONFIG, step(before, after, 600.0))
    loop.run(600.0)
    # The tick at 600 s is the first to see the step; two more fill the panic window.
    loop.run(TAKES_S + 3 * TICK_S)
    loop.tick()

    assert loop.ready >= after


@laws
@given(st.integers(4, 80), st.integers(1, 100))
def test_any_step_is_served_once_it_fills_the_stable_window(
    make_loop: MakeLoop, before: int, percent: int
) -> None:
    after = math.ceil(before * (1 + percent / 100))
    loop = make_loop(CONFIG, step(before, after, 600.0))
    loop.run(600.0 + 60.0 + TAKES_S + TICK_S)

    assert loop.ready >= after


@laws
@given(st.integers(0, 80), st.integers(0, 120))
def test_at_constant_load_the_direction_changes_once_within_the_delay_at_most(
    make_loop: MakeLoop, before: int, after: int
) -> None:
    loop = make_loop(CONFIG, step(before, after, 300.0))
    loop.run(1_200.0)
    wanted = [(n * TICK_S, found.desired) for n, found in enumerate(loop.decisions)]
    changes = [(at_s, b - a) for (_, a), (at_s, b) in pairwise(wanted) if at_s > 300]
    moves = [(at_s, change > 0) for at_s, change in changes if change]
    turns = [at_s for (_, one), (at_s, other) in pairwise(moves) if one != other]

    assert all(late - early > DELAY_S for early, late in pairwise(turns))
    assert len({found.desired for found in loop.decisions[-100:]}) == 1


@laws
@given(st.integers(0, 80), st.integers(0, 120))
def test_no_more_is_created_than_overcommitted_demand_and_the_cap_is_never_met(
    make_loop: MakeLoop, before: int, after: int
) -> None:
    loop = make_loop(CONFIG, step(before, after, 300.0))
    loop.run(900.0)

    assert loop.created <= 1.5 * (before + after) + 2
    assert not any(found.is_hard_capped for found in loop.decisions)


@laws
@given(st.integers(2, 80))
def test_a_minute_after_a_restart_decisions_are_as_if_there_had_been_none(
    make_loop: MakeLoop, demand: int
) -> None:
    loops = [make_loop(CONFIG, lambda _: demand) for _ in range(2)]
    for loop in loops:
        loop.run(600.0)
    loops[1].restart()
    for _ in range(120):
        found = [loop.tick().desired for loop in loops]
        assert found[0] == found[1]


def test_a_replica_more_is_created_for_nobody_while_others_are_on_their_way(
    make_loop: MakeLoop,
) -> None:
    loop = make_loop(CONFIG, lambda _: 40)
    loop.run(300.0)

    # ceil(40 / 0.8), however many ticks passed while none was ready.
    assert loop.created == loop.ready == 50


def test_an_idle_pool_keeps_its_last_replica_unless_it_may_go(make_loop: MakeLoop) -> None:
    kept, gone = (make_loop(config, step(8, 0, 300.0)) for config in (CONFIG, ZERO))
    for loop in (kept, gone):
        loop.run(1_200.0)

    assert (kept.ready, gone.ready) == (1, 0)
    # Not before a whole stable window, the grace, and the delay are over.
    assert all(found.desired for n, found in enumerate(gone.decisions) if n * TICK_S < 300 + 120)


def test_a_pool_at_zero_has_a_replica_soon_after_the_first_is_asked_for(
    make_loop: MakeLoop,
) -> None:
    loop = make_loop(ZERO, step(0, 1, 600.0))
    loop.run(600.0)
    assert loop.ready == 0
    loop.run(TAKES_S + TICK_S)
    loop.tick()

    assert loop.ready >= 1


def wave_at(start_s: float, count: int, *, heard_s: float) -> DemandPlan:
    lease = (Quantile(0.5, 60.0), Quantile(0.99, 200.0))
    wave = Wave(template="python", count=count, start_s=start_s, sigma_s=5.0, lease=lease)
    return DemandPlan(run_id="r", version=1, heard_s=heard_s, until_s=9_999.0, waves=(wave,))


def test_a_planned_wave_finds_its_replicas_ready(make_loop: MakeLoop) -> None:
    def plans(now_s: float) -> list[DemandPlan]:
        return [wave_at(600.0, 64, heard_s=now_s)] if now_s < 600 else []

    loop = make_loop(CONFIG, step(0, 64, 600.0), plans)
    loop.run(500.0)
    assert loop.ready <= 1, "nothing is created long before"
    loop.run(100.0)

    assert loop.ready >= 64


def test_a_plan_that_nobody_confirms_does_not_keep_a_pool_from_zero(make_loop: MakeLoop) -> None:
    # Its wave is overdue for ever, and its run was last heard at the start.
    loop = make_loop(ZERO, lambda _: 0, lambda _: [wave_at(100.0, 32, heard_s=60.0)])
    loop.run(200.0)
    assert loop.ready >= 32
    loop.run(600.0)

    assert loop.ready == 0


@laws
@given(st.integers(8, 80))
def test_spares_go_as_soon_as_enough_are_ready_and_what_is_planned_stays(
    make_loop: MakeLoop, count: int
) -> None:
    wave = Wave(template="python", count=count, start_s=400.0)
    plan = DemandPlan(run_id="run", version=1, heard_s=300.0, until_s=2_000.0, waves=(wave,))
    loop = make_loop(CONFIG, lambda _: 0)
    loop.plans = lambda _: [plan]
    loop.run(400.0)

    most = max(found.desired for found in loop.decisions)
    assert most > count, "some are begun in case that others fail"
    assert len(loop.born_s) == loop.ready == count


@laws
@given(st.integers(1, 60), st.floats(0.0, 0.5))
def test_as_many_as_there_are_spares_may_fail_at_once_and_are_begun_again(
    make_loop: MakeLoop, count: int, failing: float
) -> None:
    loop = make_loop(CONFIG, lambda _: 0, took=ProvisionTime(TAKES_S, TAKES_S, failing))
    loop.plans = lambda now_s: [wave_at(20.0, count, heard_s=now_s)]
    begun = loop.tick().creates
    failed = begun - count
    assert failed > 0
    del loop.born_s[count:]
    loop.gone_s += [loop.now_s] * failed
    found = loop.tick()

    assert found.creates == failed
    # The new ones are there beside those that are on their way out.
    assert not loop.tick().is_hard_capped


@laws
@given(st.integers(1, 80), st.integers(0, 80))
def test_where_every_new_replica_fails_there_are_never_more_than_overcommitted_demand(
    make_loop: MakeLoop, count: int, ready: int
) -> None:
    failed: list[float | None] = []
    loop = make_loop(CONFIG, lambda _: 0)
    loop.born_s = [-TAKES_S] * ready
    loop.restart()
    loop.plans = lambda now_s: [wave_at(60.0, count, heard_s=now_s)]
    for _ in range(300):
        loop.took = estimate_provision(failed)
        found = loop.tick()
        failed += [None] * found.creates
        del loop.born_s[len(loop.born_s) - found.creates :]

        assert found.desired <= max(ready, math.ceil(1.5 * count))
        assert found.hard_cap <= math.ceil(1.5 * max(ready, math.ceil(1.5 * count)))


@pytest.mark.parametrize(("holder", "replicas"), [("r", 80), ("another", 100)])
def test_a_plan_shortens_the_windows_for_its_own_run_alone(
    make_loop: MakeLoop, holder: str, replicas: int
) -> None:
    short = ScalingParameters(target_utilization_percent=100.0, stable_window_s=30.0)
    loop = make_loop(replace(CONFIG, while_planned=short), lambda _: 80)
    loop.plans = lambda now_s: [wave_at(3_000.0, 1, heard_s=now_s)]
    loop.holders = frozenset({holder})
    loop.run(600.0)

    assert loop.decisions[-1].desired == replicas
