"""Autoscaler settings of a pool's spec, with defaults for fields that are not set."""

from collections.abc import Iterator

from etude.common.api.meta import number
from etude.common.api.pool import cron
from etude.common.api.pool.autoscaling import Autoscaling as Given
from etude.common.api.pool.autoscaling import PredictiveScaling, ScalingMode
from etude.common.api.pool.autoscaling import ScheduleEntry as GivenEntry
from etude.common.api.pool.spec import EnvPoolSpec
from etude.operator.pools.autoscaling.config import (
    LEAST_PANIC_S,
    Mode,
    PoolScalingConfig,
    PredictiveParameters,
    Refill,
    ScaleToZero,
    ScalingCosts,
    ScalingParameters,
    ScheduleEntry,
    ZeroMode,
)

MOST_REPLICAS = 10_000
REACTIVE = ScalingParameters(mode=Mode.REACTIVE)
UNPLANNED = ScalingParameters(max_scale_up_rate=1_000.0, scale_down_delay_s=30.0)
"""Defaults of mode Predictive without a usable plan: a run's first waves come without one."""
PLANNED = ScalingParameters(
    target_utilization_percent=100.0,
    stable_window_s=30.0,
    max_scale_up_rate=1_000.0,
    scale_down_delay_s=15.0,
    predictive=PredictiveParameters(service_level_percent=80.0),
)
"""Defaults of mode Predictive while all demand is planned: delays may be short."""


def pool_config(spec: EnvPoolSpec) -> PoolScalingConfig:
    """The autoscaler settings of a pool that sizes itself.

    Raises:
        ValueError: the pool does not size itself.
    """
    given = spec.autoscaling
    if given is None or spec.max_replicas is None or not spec.is_sized_for_demand:
        raise ValueError(f"a pool in mode {spec.mode} does not size itself")
    is_planning = given.mode is ScalingMode.PREDICTIVE
    return PoolScalingConfig(
        max_replicas=spec.max_replicas,
        slots_per_replica=spec.slots_per_replica,
        min_idle=spec.min_idle or 0,
        overcommit_factor=1.5 if spec.overcommit_factor is None else number(spec.overcommit_factor),
        autoscaling=_autoscaling(given, UNPLANNED if is_planning else REACTIVE),
        while_planned=_autoscaling(given, PLANNED) if is_planning else None,
    )


def planning_config(spec: EnvPoolSpec) -> PoolScalingConfig:
    """The settings by which plans are read for a pool that an external autoscaler sizes."""
    most = spec.max_replicas or MOST_REPLICAS
    slots = spec.slots_per_replica
    return PoolScalingConfig(max_replicas=most, slots_per_replica=slots, autoscaling=PLANNED)


def schedule_problems(spec: EnvPoolSpec, *, at: str) -> Iterator[str]:
    """Problems of a schedule that no schema can express, each with its field and fix."""
    for place, entry in enumerate(spec.autoscaling.schedule if spec.autoscaling else ()):
        found = cron.find_problem(entry.cron, entry.time_zone)
        if found is not None:
            which = f"{at}.autoscaling.schedule[{place}].{found.field}"
            yield f"{which}: {found.what}: {found.fix}"


def _autoscaling(given: Given, usual: ScalingParameters) -> ScalingParameters:
    zero, refill = given.scale_to_zero, given.refill
    stable_s = _or_default(given.stable_window_seconds, usual.stable_window_s)
    panic_percent = _or_default(given.panic_window_percent, usual.panic_window_percent)
    return ScalingParameters(
        mode=Mode(given.mode.value),
        target_utilization_percent=_or_default(
            given.target_utilization_percent, usual.target_utilization_percent
        ),
        stable_window_s=stable_s,
        # A share of 60 s was admitted: of the 30 s of a pool with a plan it may be too short.
        panic_window_percent=max(panic_percent, 100 * LEAST_PANIC_S / stable_s),
        panic_threshold_percent=_or_default(
            given.panic_threshold_percent, usual.panic_threshold_percent
        ),
        max_scale_up_rate=_or_default(given.max_scale_up_rate, usual.max_scale_up_rate),
        max_scale_down_rate=_or_default(given.max_scale_down_rate, usual.max_scale_down_rate),
        scale_down_delay_s=_or_default(given.scale_down_delay_seconds, usual.scale_down_delay_s),
        burst_capacity=given.burst_capacity or 0,
        scale_to_zero=ScaleToZero()
        if zero is None
        else ScaleToZero(mode=ZeroMode(zero.mode.value), grace_s=float(zero.grace_seconds)),
        schedule=tuple(map(_entry, given.schedule)),
        predictive=_predictive(given.predictive or PredictiveScaling()),
        refill=Refill()
        if refill is None
        else Refill(
            max_per_second=float(refill.max_per_second), max_in_flight=refill.max_in_flight
        ),
    )


def _entry(entry: GivenEntry) -> ScheduleEntry:
    return ScheduleEntry(cron=entry.cron, min_idle=entry.min_idle, time_zone=entry.time_zone)


def _predictive(given: PredictiveScaling) -> PredictiveParameters:
    costs = given.costs
    return PredictiveParameters(
        service_level_percent=float(given.service_level_percent),
        costs=None
        if costs is None
        else ScalingCosts(
            gpu_second=number(costs.gpu_second), sandbox_second=number(costs.sandbox_second)
        ),
        max_horizon_s=float(given.max_horizon_seconds),
        plan_stale_s=float(given.plan_stale_seconds),
    )


def _or_default(given: int | None, usual: float) -> float:
    return usual if given is None else float(given)
