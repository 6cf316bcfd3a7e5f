"""Autoscaling part of a pool's status: conditions, causes and provisioning times."""

from collections.abc import Iterator

from etude.common.api.kinds import EnvPool
from etude.common.api.pool.status import AutoscalerStatus, ProvisionStatus
from etude.operator.actions import Moment
from etude.operator.clock import rfc3339
from etude.operator.conditions import Fact, no, yes
from etude.operator.pools.autoscaling.values import Cause, PoolDecision
from etude.operator.pools.size import Size
from etude.operator.reasons import Reason


def scale_facts(pool: EnvPool, size: Size) -> Iterator[Fact]:
    """Conditions of a pool that sizes itself; other pools have none of them."""
    decision = size.decision
    if decision is None or decision.cause is Cause.UNKNOWN:
        return
    spare = decision.excess_burst_capacity
    if spare >= 0:
        yield yes("BurstCapacityMet", Reason.BURST_FITS)
    else:
        words = f"{-spare} slots are missing for the demand and spec.autoscaling.burstCapacity"
        yield no("BurstCapacityMet", Reason.BURST_TOO_LARGE, words)
    if decision.is_hard_capped:
        words = f"recent demand explains at most {decision.hard_cap} hosts"
        yield yes("HardCapped", Reason.OVERPROVISIONED, words)
    else:
        yield no("HardCapped", Reason.HEALTHY)


def autoscaler(pool: EnvPool, size: Size, now: Moment) -> AutoscalerStatus:
    """Status of the autoscaler: figures and cause of the last decision."""
    before, decision = pool.status.autoscaler, size.decision
    mode = Cause.UNKNOWN.value if size.is_blind else str(pool.spec.mode)
    changes: dict[str, object] = {"mode": mode, "plan_peak": size.plan_peak}
    if decision is not None:
        changes = _decided(decision, size)
    if size.desired != pool.status.desired:
        changes["last_scale_time"] = rfc3339(now.wall_s)
        changes["last_reason"] = _why(pool, size)
    kept = (
        before
        if decision is not None
        else AutoscalerStatus(
            last_scale_time=before.last_scale_time, last_reason=before.last_reason
        )
    )
    return kept.model_copy(update=changes)


def provision(size: Size) -> ProvisionStatus | None:
    """Provisioning times of hosts; None while they are assumed."""
    if not size.samples:
        return None
    took = size.provision
    return ProvisionStatus(
        p50_seconds=f"{took.p50_s:.1f}", p95_seconds=f"{took.p95_s:.1f}", samples=size.samples
    )


def _decided(decision: PoolDecision, size: Size) -> dict[str, object]:
    if decision.cause is Cause.UNKNOWN:
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


def _why(pool: EnvPool, size: Size) -> str:
    decision = size.decision
    words = f"{pool.status.desired} to {size.desired}: "
    if decision is None:
        return words + "spec.replicas"
    match decision.cause:
        case Cause.PLANNED:
            return words + f"plans ask for {decision.plan_peak:.0f} slots"
        case Cause.SCHEDULED:
            return words + "the schedule"
        case Cause.PANIC:
            return words + f"a burst of {decision.panicked:.0f} slots"
        case Cause.STABLE:
            return words + f"{decision.stable:.1f} slots were in demand"
        case Cause.UNKNOWN:
            return words + "brokers are silent"
