"""Predictive scaling: environments that usable plans ask for, while there is time to create them.

The base stock over the lead time: the highest demand, at the service level, of any moment by which
a replica that is created now would just be ready. A plan is usable while it is current and its
forecasts have been accurate.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from etude.common.api.meta import number
from etude.common.plans.forecast import (
    Assurance,
    CountDistribution,
    Quantile,
    RunningEnvironments,
    Supply,
    Wave,
    assurance,
    demand,
    lead_s,
    remaining_environments,
)
from etude.common.plans.registry import is_accurate
from etude.operator.pools.autoscaling.config import TICK_S, PoolScalingConfig, ScalingParameters
from etude.operator.pools.autoscaling.limits import overcommit
from etude.operator.pools.autoscaling.provisioning import ProvisionTime, with_spares
from etude.operator.pools.autoscaling.values import DemandPlan, PoolMetrics

LEAST_LEVEL, MOST_LEVEL = 0.5, 0.999
"""Below one half the forecast's own mean would be undercut; no distribution is known beyond."""


def service_level(
    config: ScalingParameters, plans: Iterable[DemandPlan], provision: ProvisionTime
) -> Assurance:
    """The newsvendor's level where costs and waiting GPUs are known, else the one that is set.

    One environment too few makes a run's GPUs wait until it is provisioned; one too many is kept
    for the scale-down delay.
    """
    gpus = max((plan.gpus for plan in plans), default=0)
    costs = config.predictive.costs
    if costs is None or not gpus:
        return assurance(config.predictive.service_level_percent / 100)
    under = gpus * number(costs.gpu_second) * provision.p50_s
    over = number(costs.sandbox_second) * config.scale_down_delay_s
    share = under / (under + over) if under + over > 0 else LEAST_LEVEL
    return assurance(min(MOST_LEVEL, max(LEAST_LEVEL, share)))


@dataclass(frozen=True, slots=True, kw_only=True)
class DemandForecast:
    """Demand by usable plans."""

    peak: float = 0.0
    """Slots to have or to start creating now."""
    firm: int = 0
    """The peak in replicas."""
    replicas: int = 0
    """The peak in replicas, with spares for those that are slow or fail."""
    kept_slots: float = 0.0
    """Slots to keep, since they would be created again soon."""


def forecast_demand(
    plans: Sequence[DemandPlan], metrics: PoolMetrics, config: PoolScalingConfig, *, now_s: float
) -> DemandForecast:
    """Demand by plans now; zero without plans."""
    if not plans:
        return DemandForecast()
    enough = service_level(config.autoscaling, plans, metrics.provision)
    waves = dict(_waves_by_template(plans, now_s))
    moments = _moments(waves, config, enough, now_s)
    base = _held_by_template(waves, metrics)
    demands = {
        name: [
            _slots_at(waves.get(name, []), base.get(name, []), at, now_s, enough) for at in moments
        ]
        for name in {*waves, *base}
    }
    certain = _certain_slots(metrics)
    totals = [certain + sum(each[n] for each in demands.values()) for n in range(len(moments))]
    supply = Supply(
        metrics.provision.p95_s,
        (metrics.ready + metrics.creating) * config.slots_per_replica,
        creation_rate(metrics, config),
    )

    def peak(name: str) -> float:
        slowest_s = metrics.provisions.get(name, metrics.provision).p95_s
        made = supply._replace(start_s=slowest_s)
        return _peak_to_create(moments, totals, demands[name], made, now_s + TICK_S)

    peak_slots = certain + sum(peak(name) for name in demands)
    replicas = math.ceil(peak_slots / config.slots_per_replica)
    spared = with_spares(replicas, metrics.ready, metrics.provision, enough)
    near_s = now_s + config.autoscaling.scale_down_delay_s + TICK_S
    return DemandForecast(
        peak=peak_slots,
        firm=replicas,
        # Where nearly all fail, no number of spares is enough.
        replicas=min(spared, overcommit(replicas, config)),
        # Everything that is given up now would have to be created again.
        kept_slots=_peak_to_create(moments, totals, totals, supply._replace(ready=0), near_s),
    )


def _certain_slots(metrics: PoolMetrics) -> int:
    """Slots in demand at any moment: leased ones without a known age, and waiting requests."""
    return metrics.queued + max(0, metrics.leased - sum(each.environments for each in metrics.held))


def _peak_to_create(
    moments: Sequence[float],
    totals: Sequence[float],
    values: Sequence[float],
    supply: Supply,
    by_s: float,
) -> float:
    """The greatest value of the moments whose creation would have to start by a time."""
    return max(
        value
        for at, total, value in zip(moments, totals, values, strict=True)
        if at <= by_s + lead_s(total - supply.ready, supply)
    )


def creation_rate(metrics: PoolMetrics, config: PoolScalingConfig) -> float:
    """Slots that can be created per second, by the rate limit and by replicas in flight."""
    refill = config.autoscaling.refill
    under_way = refill.max_in_flight / max(metrics.provision.p50_s, TICK_S)
    return config.slots_per_replica * min(refill.max_per_second, under_way)


def _waves_by_template(
    plans: Sequence[DemandPlan], now_s: float
) -> Iterator[tuple[str, list[Wave]]]:
    """Waves by template; an overdue wave may start at any moment."""
    waves: dict[str, list[Wave]] = {}
    for plan in plans:
        for wave in plan.waves:
            late = wave if wave.start_s >= now_s else replace(wave, start_s=now_s)
            waves.setdefault(wave.template, []).append(late)
    yield from waves.items()


def _moments(
    waves: Mapping[str, Sequence[Wave]], config: PoolScalingConfig, enough: Assurance, now_s: float
) -> list[float]:
    """Now, and the moments at which demand can rise: between them it only falls."""
    horizon_s = now_s + config.autoscaling.predictive.max_horizon_seconds
    moments = {now_s}
    for group in waves.values():
        for wave in group:
            certain_s = wave.start_s - wave.sigma_s * enough.deviations
            moments |= {max(now_s, certain_s), wave.start_s}
    return sorted(at for at in moments if at <= horizon_s)


def _held_by_template(
    waves: Mapping[str, Sequence[Wave]], metrics: PoolMetrics
) -> dict[str, list[RunningEnvironments]]:
    leases: dict[str, tuple[Quantile, ...]] = {
        name: group[0].lease or metrics.lease for name, group in waves.items()
    }
    held: dict[str, list[RunningEnvironments]] = {}
    for each in metrics.held:
        lease = leases.get(each.template, metrics.lease)
        running = RunningEnvironments(count=each.environments, age_s=each.age_s, lease=lease)
        held.setdefault(each.template, []).append(running)
    return held


def _slots_at(
    waves: Sequence[Wave],
    base: Sequence[RunningEnvironments],
    at_s: float,
    now_s: float,
    enough: Assurance,
) -> float:
    """Slots of one template that suffice at a moment."""
    held: list[CountDistribution] = [
        remaining_environments(running, at_s - now_s) for running in base
    ]
    return demand(waves, at_s, base=held, enough=enough)


def is_plan_current(plan: DemandPlan, config: ScalingParameters, *, now_s: float) -> bool:
    """The plan is current: its controller reports, and its horizon is not over.

    A silent plan gets the grace period of an idle pool; a plan that is over gets none, since its
    broker has dropped it.
    """
    silent_s = (
        plan.heard_s + config.predictive.plan_stale_seconds + config.scale_to_zero.grace_seconds
    )
    return now_s <= min(silent_s, plan.until_s)


def is_plan_reliable(plan: DemandPlan) -> bool:
    """Observed demand was near enough to the forecast."""
    return is_accurate(plan.ratio)


def usable_plans(
    plans: Iterable[DemandPlan], config: ScalingParameters, *, now_s: float
) -> tuple[DemandPlan, ...]:
    """Plans that are reliable and current."""
    return tuple(
        plan
        for plan in plans
        if is_plan_reliable(plan) and is_plan_current(plan, config, now_s=now_s)
    )


def is_all_planned(believed: Iterable[DemandPlan], holders: Collection[str]) -> bool:
    """All demand of a pool comes from runs with a usable plan.

    A plan without further waves counts too: unplanned demand would make it unreliable.

    Args:
        believed: usable plans.
        holders: runs that hold leases; one without a plan may ask for anything.
    """
    planning = {plan.run_id for plan in believed}
    return bool(planning) and planning.issuperset(holders)
