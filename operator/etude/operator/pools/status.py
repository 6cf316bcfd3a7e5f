"""Status conditions and figures of a pool."""

from collections.abc import Mapping, Sequence

from etude.common.api.kinds import EnvPool
from etude.common.api.pool.status import EnvPoolStatus, LeaseStatus, Slots
from etude.operator import names, pod_failures
from etude.operator.actions import ClockReading
from etude.operator.clock import rfc3339
from etude.operator.conditions import (
    ConditionFact,
    false_condition,
    merge_conditions,
    true_condition,
)
from etude.operator.manifests import is_true
from etude.operator.pools.autoscaling.values import ScalingCause
from etude.operator.pools.observe import ObservedPool, staying_hosts
from etude.operator.pools.scale_status import autoscaler_status, provision_status, scale_facts
from etude.operator.pools.size import PoolSize
from etude.operator.reasons import Reason
from etude.v1 import environments_pb2

ISOLATION = {
    environments_pb2.ISOLATION_WEAK: "Weak",
    environments_pb2.ISOLATION_MODERATE: "Moderate",
    environments_pb2.ISOLATION_STRONG: "Strong",
}

MAX_NAMED = 10
"""Most hosts that a message names."""

NO_BROKER: Mapping[str, object] = {
    "slots": Slots(),
    "leases": None,
    "driver": "",
    "isolation": "",
}
"""Figures of a pool without a ready broker: the last ones are out of date."""


def pool_status(
    pool: EnvPool,
    observed: ObservedPool,
    size: PoolSize,
    now: ClockReading,
    problem: ConditionFact | None,
) -> EnvPoolStatus:
    """The whole status of a pool.

    Args:
        pool: with its spec.
        observed: its observed state.
        size: hosts that it should have.
        now: both clocks.
        problem: of the pool itself, for which nothing is created then. After a rejection by the
            cluster (`observed.problem`) the existing children go on.
    """
    counts = _host_counts(observed, size)
    facts = [
        problem or observed.problem or true_condition("Accepted", Reason.ACCEPTED),
        _available(pool, observed, size, problem),
        _degraded(observed, size),
        _scheduled(observed),
        *scale_facts(pool, size),
    ]
    changes: dict[str, object] = {
        **counts,
        "observed_generation": pool.metadata.generation,
        "autoscaler": autoscaler_status(pool, size, now),
        # The figure of an earlier operator holds until hosts are created again.
        "provision": provision_status(size) or pool.status.provision,
        "selector": f"{names.POOL}={pool.metadata.name},{names.ROLE}={names.HOST}",
        "conditions": merge_conditions(
            facts,
            pool.status.conditions,
            generation=pool.metadata.generation,
            now=rfc3339(now.wall_s),
        ),
        "phase": _phase(facts, size, counts["ready_replicas"]),
    }
    if not any(is_true(pod, "Ready") for pod in observed.brokers):
        changes |= NO_BROKER
    elif observed.report.newest is not None:
        changes |= _reported(observed.report.newest)
    return pool.status.model_copy(update=changes)


def _host_counts(observed: ObservedPool, size: PoolSize) -> dict[str, int]:
    staying = staying_hosts(observed.hosts)
    ready = sum(is_true(host, "Ready") for host in staying)
    return {
        "replicas": len(staying),
        "ready_replicas": ready,
        "desired": size.desired,
        "creating": len(staying) - ready,
        "terminating": len(observed.hosts) - len(staying),
        "unschedulable": len(size.findings.unschedulable),
        "quarantined": len(size.findings.quarantined),
        "draining": len(size.retiring),
    }


def _reported(newest: environments_pb2.WatchPoolResponse) -> dict[str, object]:
    return {
        "slots": Slots(
            idle=max(0, newest.slots - newest.leased + newest.preempted - newest.opening),
            leased=newest.leased,
            preempted=newest.preempted,
            reserved=newest.reserved,
            opening=newest.opening,
            queued=newest.waiting,
        ),
        "leases": LeaseStatus(
            granted_total=newest.granted_total,
            expired_total=newest.expired_total,
            acquire_p50_ms=newest.acquire_p50_ms,
            acquire_p99_ms=newest.acquire_p99_ms,
            warm_hit_percent=newest.warm_percent,
        ),
        "driver": newest.driver,
        "isolation": ISOLATION.get(newest.isolation, ""),
    }


def _available(
    pool: EnvPool, observed: ObservedPool, size: PoolSize, problem: ConditionFact | None
) -> ConditionFact:
    if problem is not None:
        return false_condition("Available", problem.reason, problem.message)
    if pool.spec.is_released:
        return false_condition("Available", Reason.SCALED_TO_ZERO, "spec.replicas is 0")
    count = pool.spec.brokers
    up = sum(is_true(pod, "Ready") for pod in observed.brokers)
    if up < count:
        message = "the broker is not ready" if count == 1 else f"{up} of {count} brokers are ready"
        return false_condition("Available", Reason.BROKER_NOT_READY, message)
    if any(is_true(host, "Ready") for host in staying_hosts(observed.hosts)):
        return true_condition("Available", Reason.NODES_READY, _floors_message(pool, observed))
    return _no_host_ready(pool, observed, size)


def _floors_message(pool: EnvPool, observed: ObservedPool) -> str:
    """Sentence for a pool with floors that are filled only as leases end."""
    newest = observed.report.newest
    count = 0 if newest is None else newest.unpreemptible_nodes
    if not count or not any(each.floor_slots for each in pool.spec.lease.classes):
        return ""
    return f"floors are filled as leases end on {count} hosts: their driver pauses nothing"


def _no_host_ready(pool: EnvPool, observed: ObservedPool, size: PoolSize) -> ConditionFact:
    if why := _host_problem(observed):
        return false_condition("Available", Reason.DRIVER_UNAVAILABLE, why)
    if observed.has_own_nodes:
        message = "no privileged node is in rotation: see nodes.nodeSelector of the chart"
        return false_condition("Available", Reason.POOL_WARMING, message)
    if not size.desired and _all_brokers_report(pool, observed):
        # A client that waits for a host before its first request would wait for ever.
        return true_condition("Available", Reason.SCALED_TO_ZERO, "the first request starts a host")
    message = pod_failures.unschedulable_message(observed.hosts) or "no host is ready"
    return false_condition("Available", Reason.POOL_WARMING, message)


def _host_problem(observed: ObservedPool) -> str:
    """Reason for which hosts start no environments, as they probed themselves; empty if none."""
    found = {
        each.node_id: each.message
        for report in observed.report.by_broker.values()
        for each in report.response.problems
    }
    if not found:
        return ""
    name, message = min(found.items())
    others = f" ({len(found)} hosts)" if len(found) > 1 else ""
    return f"{name}{others}: {message}"


def _all_brokers_report(pool: EnvPool, observed: ObservedPool) -> bool:
    """Every broker reports, so a request would be observed."""
    return len(observed.report.by_broker) >= pool.spec.brokers


def _scheduled(observed: ObservedPool) -> ConditionFact:
    words = pod_failures.unschedulable_message(staying_hosts(observed.hosts))
    return (
        false_condition("Scheduled", Reason.UNSCHEDULABLE, words)
        if words
        else true_condition("Scheduled", Reason.SCHEDULED)
    )


def _degraded(observed: ObservedPool, size: PoolSize) -> ConditionFact:
    pods = [*observed.brokers, *observed.api_pods, *observed.hosts]
    message = pod_failures.waiting_message(pods, pod_failures.PULL_FAILURES)
    if message:
        return true_condition("Degraded", Reason.IMAGE_PULL_FAILED, message)
    message = pod_failures.waiting_message(pods, pod_failures.CRASHES)
    if message:
        refused = any(
            failure.exit_code in pod_failures.CONFIGURATION_EXITS
            for failure in pod_failures.find_failures(names.HOST, observed.hosts)
        )
        reason = Reason.DRIVER_UNAVAILABLE if refused else Reason.CRASH_LOOPING
        return true_condition("Degraded", reason, message)
    kept = size.findings.quarantined
    if kept:
        message = f"unhealthy hosts in quarantine: {', '.join(kept[:MAX_NAMED])}; see their logs"
        return true_condition("Degraded", Reason.NODES_QUARANTINED, message)
    return false_condition("Degraded", Reason.HEALTHY)


def _phase(facts: Sequence[ConditionFact], size: PoolSize, ready: int) -> str:
    fact = {f.type: f for f in facts}
    is_panic = size.decision is not None and size.decision.cause is ScalingCause.PANIC
    phases = (
        (not fact["Accepted"].holds and not fact["Available"].holds, "Pending"),
        (fact["Degraded"].holds, "Degraded"),
        (not size.desired and not ready, "ScaledToZero"),
        (not fact["Available"].holds, "Warming"),
        (is_panic and ready < size.desired, "Bursting"),
        (ready < size.desired, "Warming"),
        (bool(size.retiring), "Draining"),
    )
    return next((word for applies, word in phases if applies), "Ready")
