"""What to do about one pool: its broker, its nodes, what to say about them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from etude.common.api.kinds import EnvPool
from etude.common.api.status import EnvPoolStatus, LeaseStatus, Resolved, Slots
from etude.operator import acceptance, failures, names
from etude.operator.actions import Action, Apply, Decision, Delete, Moment
from etude.operator.clock import rfc3339
from etude.operator.cluster.api import Cluster
from etude.operator.conditions import Fact, conditions, no, yes
from etude.operator.desired import pools as desired_pools
from etude.operator.desired.runs import Platform
from etude.operator.manifests import (
    Manifest,
    Ref,
    is_applied,
    is_deleting,
    is_true,
    labels,
    ref,
    uid,
)
from etude.operator.reasons import Reason
from etude.operator.reports.latest import PoolReport, ReportBook
from etude.operator.runs import verdicts
from etude.v1 import environments_pb2

_OVER = {"Failed", "Succeeded"}

ISOLATION = {
    environments_pb2.ISOLATION_WEAK: "Weak",
    environments_pb2.ISOLATION_MODERATE: "Moderate",
    environments_pb2.ISOLATION_STRONG: "Strong",
}

UNSERVED: Mapping[str, object] = {
    "slots": Slots(),
    "leases": None,
    "driver": "",
    "isolation": "",
}
"""Figures of a pool without a broker: those of the last one say nothing about now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenPool:
    """What is known of a pool; from caches alone."""

    children: Mapping[Ref, Manifest] = field(default_factory=dict)
    nodes: Sequence[Manifest] = ()
    brokers: Sequence[Manifest] = ()
    edges: Sequence[Manifest] = ()
    report: PoolReport = field(default_factory=PoolReport)
    problem: Fact | None = None


def gather(cluster: Cluster, book: ReportBook, pool: EnvPool, problem: Fact | None) -> SeenPool:
    """Everything that a decision about this pool depends on."""
    children = {ref(m): m for m in cluster.owned(pool.metadata.uid)}
    sets = {
        labels(m).get(names.ROLE, ""): cluster.owned(uid(m))
        for m in children.values()
        if m["kind"] == "StatefulSet"
    }
    return SeenPool(
        children=children,
        nodes=[m for m in children.values() if labels(m).get(names.ROLE) == names.NODE],
        brokers=[p for p in sets.get(names.BROKER, ()) if p["kind"] == "Pod"],
        edges=[p for p in sets.get(names.EDGE, ()) if p["kind"] == "Pod"],
        report=book.pool(pool.metadata.uid),
        problem=problem,
    )


def decide(
    pool: EnvPool, seen: SeenPool, now: Moment, platform: Platform
) -> Decision[EnvPoolStatus]:
    """One pass over one pool. No I/O, no clock."""
    if pool.metadata.deletion_timestamp:
        return Decision(status=pool.status.model_copy(update={"phase": "Terminating"}))
    problem = acceptance.pool_problem(pool, platform)
    if problem is None and pool.status.resolved is None:
        resolved = Resolved(images=dict(platform.images))
        return Decision(
            status=pool.status.model_copy(update={"resolved": resolved, "phase": "Pending"}),
            requeue_after_s=0.0,
        )
    actions = () if problem is not None else tuple(_actions(pool, seen, platform))
    return Decision(status=_status(pool, seen, now, problem or seen.problem), actions=actions)


def ordinals(pool: EnvPool, nodes: Sequence[Manifest]) -> tuple[int, ...]:
    """Which nodes should exist: those that do, up to the wanted number, then the lowest free ones.

    A node on its way out still holds its ordinal. Too many nodes lose the highest first.
    """
    taken = {_ordinal(node): node for node in nodes}
    staying = sorted(n for n, node in taken.items() if not is_deleting(node))
    free = (n for n in range(len(taken) + pool.spec.replicas) if n not in taken)
    kept = staying[: pool.spec.replicas]
    return tuple(sorted([*kept, *(next(free) for _ in range(pool.spec.replicas - len(kept)))]))


def _ordinal(node: Manifest) -> int:
    return names.ordinal(node["metadata"]["name"])


def _actions(pool: EnvPool, seen: SeenPool, platform: Platform) -> Iterator[Action]:
    assert pool.status.resolved is not None, "recorded before"  # noqa: S101 - our own mistake
    wanted = ordinals(pool, seen.nodes)
    for node in seen.nodes:
        is_over = node.get("status", {}).get("phase") in _OVER
        if (_ordinal(node) not in wanted or is_over) and not is_deleting(node):
            yield Delete(ref(node), uid(node))
    children = desired_pools.pool_children(pool, wanted, pool.status.resolved.images, platform)
    for manifest in children:
        live = seen.children.get(ref(manifest))
        # A pod's template is fixed when it is made: what runs is left as it is.
        is_stale = live is not None and live["kind"] != "Pod" and not is_applied(live, manifest)
        if live is None or is_stale:
            yield Apply(manifest, names.POOL_FIELD_MANAGER)
    yield from _prunings(pool, seen, {ref(manifest) for manifest in children})


def _prunings(pool: EnvPool, seen: SeenPool, wanted: set[Ref]) -> Iterator[Delete]:
    """Children of parts that left the spec; what others gave the pool as an owner is theirs."""
    ours = desired_pools.pool_labels(pool).items()
    for key, live in seen.children.items():
        is_part = key.kind in {"Service", "StatefulSet"} and ours <= labels(live).items()
        if is_part and key not in wanted and not is_deleting(live):
            yield Delete(key, uid(live))


def _status(pool: EnvPool, seen: SeenPool, now: Moment, problem: Fact | None) -> EnvPoolStatus:
    staying = [node for node in seen.nodes if not is_deleting(node)]
    ready = sum(is_true(node, "Ready") for node in staying)
    accepted = problem or yes("Accepted", Reason.ACCEPTED)
    found = [accepted, _available(pool, seen, ready, problem), _degraded(seen)]
    changes: dict[str, object] = {
        "observed_generation": pool.metadata.generation,
        "replicas": len(staying),
        "ready_replicas": ready,
        "selector": f"{names.POOL}={pool.metadata.name},{names.ROLE}={names.NODE}",
        "conditions": conditions(
            found,
            pool.status.conditions,
            generation=pool.metadata.generation,
            now=rfc3339(now.wall_s),
        ),
        "phase": _phase(pool, found, ready),
    }
    if not _is_served(seen):
        changes |= UNSERVED
    elif seen.report.newest is not None:
        changes |= _reported(seen.report.newest)
    return pool.status.model_copy(update=changes)


def _is_served(seen: SeenPool) -> bool:
    return any(is_true(pod, "Ready") for pod in seen.brokers)


def _reported(newest: environments_pb2.WatchPoolResponse) -> dict[str, object]:
    return {
        "slots": Slots(
            idle=max(0, newest.slots - newest.leased), leased=newest.leased, queued=newest.waiting
        ),
        "leases": LeaseStatus(
            granted_total=newest.granted_total,
            expired_total=newest.expired_total,
            acquire_p50_ms=newest.acquire_p50_ms,
            acquire_p99_ms=newest.acquire_p99_ms,
        ),
        "driver": newest.driver,
        "isolation": ISOLATION.get(newest.isolation, ""),
    }


def _available(pool: EnvPool, seen: SeenPool, ready: int, problem: Fact | None) -> Fact:
    if problem is not None:
        return no("Available", problem.reason, problem.message)
    if not pool.spec.replicas:
        return no("Available", Reason.SCALED_TO_ZERO, "spec.replicas is 0")
    count = pool.spec.brokers
    up = sum(is_true(pod, "Ready") for pod in seen.brokers)
    if up < count:
        words = "the broker is not ready" if count == 1 else f"{up} of {count} brokers are ready"
        return no("Available", Reason.BROKER_NOT_READY, words)
    if not ready:
        words = failures.unschedulable(seen.nodes) or "no node is ready"
        return no("Available", Reason.POOL_WARMING, words)
    return yes("Available", Reason.NODES_READY)


def _degraded(seen: SeenPool) -> Fact:
    pods = [*seen.brokers, *seen.edges, *seen.nodes]
    words = failures.trouble(pods, failures.PULL_FAILURES)
    if words:
        return yes("Degraded", Reason.IMAGE_PULL_FAILED, words)
    words = failures.trouble(pods, failures.CRASHES)
    if words:
        refused = any(
            failure.exit_code in verdicts.CONFIGURATION_EXITS
            for failure in failures.failures(names.NODE, seen.nodes)
        )
        reason = Reason.DRIVER_UNAVAILABLE if refused else Reason.CRASH_LOOPING
        return yes("Degraded", reason, words)
    return no("Degraded", Reason.HEALTHY)


def _phase(pool: EnvPool, found: Sequence[Fact], ready: int) -> str:
    fact = {f.type: f for f in found}
    words = (
        (not fact["Accepted"].holds, "Pending"),
        (fact["Degraded"].holds, "Degraded"),
        (not pool.spec.replicas, "ScaledToZero"),
        (not fact["Available"].holds, "Warming"),
        (ready < pool.spec.replicas, "Warming"),
    )
    return next((word for applies, word in words if applies), "Ready")
