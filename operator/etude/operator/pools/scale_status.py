"""Autoscaling part of a pool's status: conditions, causes and provisioning times."""

from collections.abc import Iterator

from etude.common.api.kinds import EnvPool
from etude.common.api.pool.status import AutoscalerStatus, ProvisionStatus
from etude.operator.actions import ClockReading
from etude.operator.clock import rfc3339
from etude.operator.conditions import ConditionFact, false_condition, true_condition
from etude.operator.pools.autoscaling.values import PoolDecision, ScalingCause
from etude.operator.pools.size import PoolSize
from etude.operator.reasons import Reason


def scale_facts(pool: EnvPool, size: PoolSize) -> Iterator[ConditionFact]:
    """Conditions of a pool that sizes itself; other pools have none of them."""
    decision = size.decision
    if decision is None or decision.cause is ScalingCause.UNKNOWN:
        return
    spare = decision.excess_burst_capacity
    if spare >= 0:
        yield true_condition("BurstCapacityMet", Reason.BURST_FITS)
    else:
        message = f"{-spare} slots are missing for the demand and spec.autoscaling.burstCapacity"
        yield false_condition("BurstCapacityMet", Reason.BURST_TOO_LARGE, message)
    if decision.is_hard_capped:
        message = f"recent demand explains at most {decision.hard_cap} hosts"
        yield true_condition("HardCapped", Reason.OVERPROVISIONED, message)
    else:
        yield false_condition("HardCapped", Reason.HEALTHY)


def autoscaler_status(pool: EnvPool, size: PoolSize, now: ClockReading) -> AutoscalerStatus:
    """Status of the autoscaler: figures and cause of the last decision."""
    recorded, decision = pool.status.autoscaler, size.decision
    mode = ScalingCause.UNKNOWN.value if size.has_silent_brokers else str(pool.spec.mode)
    changes: dict[str, object] = {"mode": mode, "plan_peak": size.plan_peak}
    if decision is not None:
        changes = _decision_fields(decision, size)
    if size.desired != pool.status.desired:
        changes["last_scale_time"] = rfc3339(now.wall_s)
        changes["last_reason"] = _reason_text(pool, size)
    status = (
        recorded
        if decision is not None
        else AutoscalerStatus(
            last_scale_time=recorded.last_scale_time, last_reason=recorded.last_reason
        )
    )
    return status.model_copy(update=changes)


def provision_status(size: PoolSize) -> ProvisionStatus | None:
    """Provisioning times of hosts; None while they are assumed."""
    if not size.samples:
        return None
    took = size.provision
    return ProvisionStatus(
        p50_seconds=f"{took.p50_s:.1f}", p95_seconds=f"{took.p95_s:.1f}", samples=size.samples
    )


def _decision_fields(decision: PoolDecision, size: PoolSize) -> dict[str, object]:
    if decision.cause is ScalingCause.UNKNOWN:
        return {"mode": decision.cause.value}
    return {
        "mode": decision.cause.value,
        "stable_value": f"{decision.stable:.1f}",
        "panic_value": f"{decision.panicked:.1f}",
        "plan_peak": round(decision.plan_peak),
        "plan_version": size.plan_version,
        "excess_burst_capacity": decision.excess_burst_capacity,
        "hard_cap": decision.hard_cap,
    }


def _reason_text(pool: EnvPool, size: PoolSize) -> str:
    decision = size.decision
    prefix = f"{pool.status.desired} to {size.desired}: "
    if decision is None:
        return prefix + "spec.replicas"
    match decision.cause:
        case ScalingCause.PLANNED:
            return prefix + f"plans ask for {decision.plan_peak:.0f} slots"
        case ScalingCause.SCHEDULED:
            return prefix + "the schedule"
        case ScalingCause.PANIC:
            return prefix + f"a burst of {decision.panicked:.0f} slots"
        case ScalingCause.STABLE:
            return prefix + f"{decision.stable:.1f} slots were in demand"
        case ScalingCause.UNKNOWN:
            return prefix + "brokers are silent"
