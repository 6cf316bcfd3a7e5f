"""Autoscaler decision: replicas of one pool, from demand, plans, schedule and limits."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from etude.common.api.pool.autoscaling import ScalingMode, ZeroMode
from etude.operator.pools.autoscaling import limits
from etude.operator.pools.autoscaling.config import PoolScalingConfig
from etude.operator.pools.autoscaling.limits import scheduled_idle, victims
from etude.operator.pools.autoscaling.predictive import (
    DemandForecast,
    forecast_demand,
    is_all_planned,
    is_plan_reliable,
    usable_plans,
)
from etude.operator.pools.autoscaling.reactive import (
    ReactiveSize,
    excess_burst_capacity,
    reactive_size,
)
from etude.operator.pools.autoscaling.values import (
    DemandPlan,
    PoolDecision,
    PoolMetrics,
    PoolState,
    ScalingCause,
)
from etude.operator.pools.autoscaling.windows import Sample, add_peak, add_sample, highest

SILENT_S = 15.0
"""Three reports of a broker that says something every five seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Requested:
    """Replicas that each source of demand asks for."""

    reactive: int
    planned: int
    """Spares included."""
    planned_firm: int
    scheduled: int
    floor: int
    """For leased slots, minIdle and the last replica."""

    @property
    def maximum(self) -> int:
        return max(self.firm, self.planned)

    @property
    def firm(self) -> int:
        """The maximum without spares."""
        return max(self.reactive, self.planned_firm, self.scheduled, self.floor)

    def cause(self, reacted: ReactiveSize) -> ScalingCause:
        """The source that asks for the most."""
        if self.planned > max(self.reactive, self.scheduled):
            return ScalingCause.PLANNED
        if self.scheduled > self.reactive:
            return ScalingCause.SCHEDULED
        return ScalingCause.PANIC if reacted.panic else ScalingCause.STABLE


def decide_pool(
    state: PoolState,
    metrics: PoolMetrics,
    plans: Sequence[DemandPlan],
    config: PoolScalingConfig,
    now_s: float,
) -> PoolDecision:
    """One decision about one pool. No I/O, no clock.

    Args:
        state: of the last decision, or initial_state().
        metrics: of the pool now.
        plans: the newest of each run that may ask this pool for environments; none of suspended or
            finished runs.
        config: of the pool, in mode Reactive or Predictive.
        now_s: on the clock of every other moment except metrics.wall_s.

    Raises:
        ValueError: in mode Manual or External.
    """
    scaling = config.autoscaling
    if scaling.mode not in {ScalingMode.REACTIVE, ScalingMode.PREDICTIVE}:
        raise ValueError(f"the autoscaler does not decide in mode {scaling.mode}")
    if is_silent(metrics, now_s=now_s):
        return _hold_size(state, metrics, config, now_s=now_s)
    usable = (
        usable_plans(plans, scaling, now_s=now_s) if scaling.mode is ScalingMode.PREDICTIVE else ()
    )
    if config.while_planned is not None and is_all_planned(usable, metrics.holders):
        config = replace(config, autoscaling=config.while_planned)
    sampled = _with_sample(state, metrics, config, now_s=now_s)
    reactive = _reactive_size(sampled, metrics, config, now_s=now_s)
    seen = forecast_demand(usable, metrics, config, now_s=now_s)
    requested = _requested_replicas(reactive, seen, metrics, config, idle_s=now_s - sampled.busy_s)
    floor = _floor(seen, reactive, state, metrics, config)
    desired = max(requested.maximum, floor)
    firm = Sample(now_s, max(requested.firm, floor))
    memory_s = limits.cap_memory_s(config)
    following = replace(
        sampled,
        panic=reactive.panic,
        peaks=add_peak(sampled.peaks, Sample(now_s, desired), keep_s=memory_s),
        lasting=add_peak(sampled.lasting, firm, keep_s=memory_s),
    )
    decision = replace(
        _explained(following, requested.cause(reactive), reactive, seen),
        unreliable=tuple(sorted(plan.run_id for plan in plans if not is_plan_reliable(plan))),
        excess_burst_capacity=_excess(reactive, metrics, config),
    )
    return _apply_limits(decision, metrics, config, least=max(reactive.least, desired), now_s=now_s)


def is_silent(metrics: PoolMetrics, *, now_s: float) -> bool:
    """The brokers' reports are too old for a decision."""
    return now_s - metrics.seen_s > SILENT_S


def _hold_size(
    state: PoolState, metrics: PoolMetrics, config: PoolScalingConfig, *, now_s: float
) -> PoolDecision:
    """The decision while brokers are silent: lost replicas are replaced, nothing else changes."""
    refill, present = config.autoscaling.refill, metrics.ready + metrics.creating
    bucket = limits.refill_tokens(state.bucket, refill, now_s=now_s)
    lost = min(state.staffed, config.max_replicas) - present
    number = limits.num_creates(lost, bucket, refill, creating=metrics.creating)
    return PoolDecision(
        state=replace(state, bucket=limits.take_tokens(bucket, number)),
        desired=state.desired,
        creates=number,
        cause=ScalingCause.UNKNOWN,
    )


def _with_sample(
    state: PoolState, metrics: PoolMetrics, config: PoolScalingConfig, *, now_s: float
) -> PoolState:
    scaling = config.autoscaling
    demanded = metrics.leased + metrics.queued
    sample = Sample(now_s, demanded)
    return replace(
        state,
        samples=add_sample(state.samples, sample, keep_s=scaling.stable_window_s),
        busy_s=now_s if demanded else state.busy_s,
        bucket=limits.refill_tokens(state.bucket, scaling.refill, now_s=now_s),
    )


def _reactive_size(
    noted: PoolState, metrics: PoolMetrics, config: PoolScalingConfig, *, now_s: float
) -> ReactiveSize:
    size = reactive_size(
        noted.samples,
        noted.panic,
        config.autoscaling,
        ready=metrics.ready,
        slots=config.slots_per_replica,
        now_s=now_s,
    )
    assert size is not None, "there is a sample of now"  # noqa: S101 - our own mistake
    return size


def _excess(reacted: ReactiveSize, metrics: PoolMetrics, config: PoolScalingConfig) -> int:
    return excess_burst_capacity(
        reacted.panicked,
        ready=metrics.ready,
        slots=config.slots_per_replica,
        burst=config.autoscaling.burst_capacity,
    )


def _explained(
    state: PoolState, cause: ScalingCause, reacted: ReactiveSize, seen: DemandForecast
) -> PoolDecision:
    """The decision's causes; its number of replicas is still the previous one."""
    return PoolDecision(
        state=state,
        desired=state.desired,
        cause=cause,
        stable=reacted.stable,
        panicked=reacted.panicked,
        plan_peak=seen.peak,
    )


def _requested_replicas(
    reacted: ReactiveSize,
    seen: DemandForecast,
    metrics: PoolMetrics,
    config: PoolScalingConfig,
    *,
    idle_s: float,
) -> _Requested:
    scaling, slots = config.autoscaling, config.slots_per_replica
    zero = scaling.scale_to_zero
    is_quiet = idle_s > scaling.stable_window_s + zero.grace_seconds
    least = 0 if zero.mode is ZeroMode.WHEN_IDLE and is_quiet else 1
    # A quiet pool may scale to zero; a pool at zero stays there until it is asked.
    if zero.mode is ZeroMode.WHEN_IDLE and not metrics.ready + metrics.creating:
        least = 0
    return _Requested(
        reactive=reacted.wanted,
        planned=seen.replicas,
        planned_firm=seen.firm,
        scheduled=math.ceil(scheduled_idle(scaling.schedule, wall_s=metrics.wall_s) / slots),
        floor=max(least, math.ceil((metrics.leased + config.min_idle) / slots)),
    )


def _floor(
    seen: DemandForecast,
    reacted: ReactiveSize,
    state: PoolState,
    metrics: PoolMetrics,
    config: PoolScalingConfig,
) -> int:
    """Least size of a pool, regardless of demand."""
    present = metrics.ready + metrics.creating
    kept = min(present, math.ceil(seen.kept_slots / config.slots_per_replica))
    return max(kept, metrics.holding, state.desired if reacted.panic else 0)


def _apply_limits(
    decision: PoolDecision,
    metrics: PoolMetrics,
    config: PoolScalingConfig,
    *,
    least: int,
    now_s: float,
) -> PoolDecision:
    """The decision with its number of replicas, creations and removals."""
    scaling, state = config.autoscaling, decision.state
    # To shrink, all that was wanted for the whole delay must be less.
    lasting = int(highest(state.lasting, scaling.scale_down_delay_s, now_s=now_s))
    spared = int(highest(state.peaks, scaling.scale_down_delay_s, now_s=now_s))
    # With spares: failed replicas are replaced while they still terminate.
    cap = limits.hard_cap(state.peaks, config, now_s=now_s)
    desired = max(metrics.holding, min(max(lasting, least), config.max_replicas, cap))
    present = metrics.ready + metrics.creating
    is_capped = limits.is_exceeded(metrics, max(cap, metrics.holding))
    number = (
        0
        if is_capped
        else limits.num_creates(
            desired - present, state.bucket, scaling.refill, creating=metrics.creating
        )
    )
    return replace(
        decision,
        state=replace(
            state,
            desired=desired,
            staffed=min(desired, present + number),
            bucket=limits.take_tokens(state.bucket, number),
        ),
        desired=desired,
        creates=number,
        # Replicas that are being created may be late or fail: they replace no ready one.
        victims=victims(metrics.idle, metrics.ready - desired),
        withdrawn=min(metrics.creating, max(0, present - desired))
        if is_capped
        else _unready_to_remove(metrics, max(desired, min(spared, config.max_replicas))),
        hard_cap=cap,
        is_hard_capped=is_capped,
    )


def _unready_to_remove(metrics: PoolMetrics, kept: int) -> int:
    """Unschedulable replicas in excess of what is kept.

    Scheduled ones are ready soon: withdrawing these too made GPUs wait 1.5 times as long in
    bench/autoscaler.py.
    """
    return min(metrics.unschedulable, max(0, metrics.ready + metrics.creating - kept))
