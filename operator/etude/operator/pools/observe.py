"""Observed state of a pool, from caches alone, and the metrics of it that its autoscaler reads."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from etude.common.api.kinds import EnvPool
from etude.common.api.pool.autoscaling import ScalingMode
from etude.common.api.pool.backend import Backend
from etude.common.plans.forecast import Quantile, Wave
from etude.operator import names
from etude.operator.actions import ClockReading
from etude.operator.conditions import ConditionFact
from etude.operator.integrations import apis
from etude.operator.kube.interface import Cluster
from etude.operator.manifests import Manifest, Ref, is_deleting, is_true, labels, ref, uid
from etude.operator.pools import agent_sandbox
from etude.operator.pools.autoscaling.provisioning import ProvisionTime, add_first_start
from etude.operator.pools.autoscaling.values import DemandPlan, HeldLeases, IdleReplica, PoolMetrics
from etude.operator.pools.health import is_unschedulable
from etude.operator.remotes.report_store import BrokerReport, PoolReport, ReportStore
from etude.v1 import environments_pb2, plan_pb2

PLANNING_MODES = (ScalingMode.PREDICTIVE, ScalingMode.EXTERNAL)
"""Modes in which plans count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedPool:
    """Children, hosts, brokers and reports of a pool."""

    children: Mapping[Ref, Manifest] = field(default_factory=dict)
    hosts: Sequence[Manifest] = ()
    brokers: Sequence[Manifest] = ()
    api_pods: Sequence[Manifest] = ()
    report: PoolReport = field(default_factory=PoolReport)
    gpus_by_run: Mapping[str, int | None] = field(default_factory=dict)
    """GPUs of each run of the namespace that has a plan, by uid; None for one that is suspended
    or over."""
    served: frozenset[str] = frozenset()
    """Served kinds of other projects that the pool needs."""
    sandbox_template: Manifest | None = None
    """The SandboxTemplate that sandboxTemplateRef names."""
    has_own_nodes: bool = False
    """Its hosts are privileged pods of the chart, known by the reports of brokers alone."""
    earlier_hosts: Sequence[Manifest] = ()
    """Hosts that the operator made before the chart had nodes for this pool."""
    problem: ConditionFact | None = None
    """The rejection that kept the last decision from being carried out."""


def observe_pool(
    cluster: Cluster,
    book: ReportStore,
    pool: EnvPool,
    problem: ConditionFact | None,
    *,
    has_own_nodes: bool = False,
) -> ObservedPool:
    """Everything that a decision about this pool depends on."""
    report = book.pool(pool.metadata.uid)
    children = {ref(m): m for m in cluster.list_owned(pool.metadata.uid)}
    sets = {
        labels(m).get(names.ROLE, ""): cluster.list_owned(uid(m))
        for m in children.values()
        if m["kind"] == "StatefulSet"
    }
    made = list(_hosts(cluster, pool, children))
    return ObservedPool(
        children=children,
        hosts=_reported(report) if has_own_nodes else made,
        earlier_hosts=made if has_own_nodes else (),
        has_own_nodes=has_own_nodes,
        brokers=[p for p in sets.get(names.BROKER, ()) if p["kind"] == "Pod"],
        api_pods=[p for p in sets.get(names.ENVIRONMENT_API, ()) if p["kind"] == "Pod"],
        report=report,
        gpus_by_run=_gpus_by_run(cluster, pool, report) if pool.spec.mode in PLANNING_MODES else {},
        served=cluster.usable_kinds(apis.needed_kinds(apis.pool_needs(pool))),
        sandbox_template=_sandbox_template(cluster, pool),
        problem=problem,
    )


def _hosts(cluster: Cluster, pool: EnvPool, children: Mapping[Ref, Manifest]) -> Iterable[Manifest]:
    if pool.spec.backend is Backend.AGENT_SANDBOX:
        return agent_sandbox.sandbox_hosts(cluster, pool, children)
    return (m for m in children.values() if labels(m).get(names.ROLE) == names.HOST)


def _reported(report: PoolReport) -> list[Manifest]:
    """Hosts in rotation at a broker, each as a pod that is ready."""
    status = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
    return [{"metadata": {"name": name}, "status": status} for name in reported_hosts(report)]


def _sandbox_template(cluster: Cluster, pool: EnvPool) -> Manifest | None:
    named = pool.spec.sandbox_template_ref
    if named is None:
        return None
    return cluster.get(Ref("SandboxTemplate", pool.metadata.namespace, named.name))


def _gpus_by_run(cluster: Cluster, pool: EnvPool, report: PoolReport) -> dict[str, int | None]:
    """GPUs by planning run, looked up one by one: scanning a large namespace dominated a pass."""
    run_ids = {
        plan.run_id for broker in report.by_broker.values() for plan in broker.response.plans
    }
    runs = {run_id: cluster.get_by_uid(run_id) for run_id in run_ids}
    return {
        run_id: None if _is_inactive(run) else _gpus(run)
        for run_id, run in runs.items()
        if run is not None
        and run["kind"] == "RLRun"
        and ref(run).namespace == pool.metadata.namespace
    }


def _is_inactive(run: Manifest) -> bool:
    over = any(is_true(run, kind) for kind in ("Suspended", "Complete", "Failed"))
    return over or bool(run["spec"].get("suspend"))


def _gpus(run: Manifest) -> int:
    """GPUs that idle while the run waits for environments."""
    roles = run["spec"].get("roles", {})
    found = (roles.get(name) or {} for name in ("trainer", "inference"))
    return sum(role.get("gpusPerReplica", 0) * role.get("replicas", 1) for role in found)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedHost:
    """Load of a host, by the reports of all brokers of its pool."""

    held: int = 0
    idle_since_s: float = -math.inf
    is_cached: bool = True
    is_draining: bool = False


def host_name(host: Manifest) -> str:
    """The name of a host, which is its pod's."""
    name: str = host["metadata"]["name"]
    return name


def staying_hosts(hosts: Sequence[Manifest]) -> list[Manifest]:
    """Hosts that are not terminating."""
    return [host for host in hosts if not is_deleting(host)]


def reported_hosts(report: PoolReport) -> dict[str, ReportedHost]:
    """Every host that a broker reports, by name."""
    hosts: dict[str, ReportedHost] = {}
    for broker in report.by_broker.values():
        for member in broker.response.members:
            known = hosts.get(member.node_id, ReportedHost())
            since_s = (
                broker.to_local_s(member.idle_since_unix_ms)
                if member.idle_since_unix_ms
                else -math.inf
            )
            hosts[member.node_id] = ReportedHost(
                held=known.held + member.held,
                idle_since_s=max(known.idle_since_s, since_s),
                is_cached=known.is_cached and member.cached,
                is_draining=known.is_draining or member.vacating,
            )
    return hosts


def pool_metrics(
    pool: EnvPool, observed: ObservedPool, *, provision: ProvisionTime, now: ClockReading
) -> PoolMetrics:
    """Metrics of the pool now.

    Args:
        pool: unless all of its brokers have reported nothing is known.
        observed: its observed state.
        provision: time that its hosts took to be ready.
        now: both clocks.
    """
    hosts, report = observed.hosts, observed.report
    staying, reported = staying_hosts(hosts), reported_hosts(report)
    ready = [host_name(host) for host in staying if is_true(host, "Ready")]
    vacated = {host_name(host) for host in staying if is_true(host, "DisruptionTarget")}
    brokers = report.by_broker.values()
    seen_s = min((broker.received_s for broker in brokers), default=-math.inf)
    return PoolMetrics(
        seen_s=seen_s if len(brokers) >= pool.spec.brokers else -math.inf,
        wall_s=now.wall_s,
        ready=len(ready),
        creating=len(staying) - len(ready),
        unschedulable=sum(map(is_unschedulable, staying)),
        terminating=len(hosts) - len(staying),
        holding=sum(
            reported[name].held > 0 for name in map(host_name, staying) if name in reported
        ),
        leased=sum(broker.response.leased + broker.response.opening for broker in brokers),
        queued=sum(_num_queued(broker.response) for broker in brokers),
        holders=frozenset(run_id for broker in brokers for run_id in broker.response.leased_by_run),
        idle=tuple(
            IdleReplica(
                name=name,
                # A host that no broker reports yet is new and has held nothing.
                since_s=reported[name].idle_since_s if name in reported else now.monotonic_s,
                is_cached=name not in reported or reported[name].is_cached,
                is_draining=name in vacated,
            )
            for name in ready
            if name not in reported or not reported[name].held
        ),
        held=tuple(_held_leases(report, now)),
        lease=_lease_quantiles(report),
        provision=provision,
        provisions=_provisions(report, provision),
    )


def _num_queued(response: environments_pb2.WatchPoolResponse) -> int:
    """Slots that are asked for: what waits cannot have those that are kept for others."""
    return response.waiting + (response.reserved if response.waiting else 0)


def _provisions(report: PoolReport, provision: ProvisionTime) -> dict[str, ProvisionTime]:
    """Time until a new host has started its first environment of each template."""
    newest = report.newest
    return {
        first.template: add_first_start(
            provision, first.p50_ms / 1000, first.p95_ms / 1000, first.count
        )
        for first in (() if newest is None else newest.first_starts)
    }


def run_plans(observed: ObservedPool) -> tuple[DemandPlan, ...]:
    """Plans of the runs that may ask for environments."""
    gpus_by_run = observed.gpus_by_run
    return tuple(
        DemandPlan(
            run_id=plan.run_id,
            version=plan.version,
            heard_s=broker.to_local_s(plan.heard_unix_ms),
            until_s=broker.to_local_s(plan.until_unix_ms),
            waves=tuple(_wave(broker, wave) for wave in plan.waves),
            ratio=plan.ratio,
            gpus=gpus_by_run.get(plan.run_id, 0) or 0,
        )
        for broker in observed.report.by_broker.values()
        for plan in broker.response.plans
        # An unknown run may belong to another operator.
        if gpus_by_run.get(plan.run_id, 0) is not None
    )


def _wave(broker: BrokerReport, wave: environments_pb2.PlannedWave) -> Wave:
    return Wave(
        template=wave.template,
        count=wave.count,
        start_s=broker.to_local_s(wave.start_unix_ms),
        sigma_s=wave.start_sigma_s,
        lease=_quantiles(wave.lease_seconds),
    )


def _held_leases(report: PoolReport, now: ClockReading) -> Iterator[HeldLeases]:
    for broker in report.by_broker.values():
        for leases in broker.response.held:
            age_s = max(0.0, now.monotonic_s - broker.to_local_s(leases.since_unix_ms))
            yield HeldLeases(leases.template, leases.count, age_s)


def _lease_quantiles(report: PoolReport) -> tuple[Quantile, ...]:
    """Lease durations by the broker that knows most leases: quantiles have no sum."""
    response = max(
        (broker.response for broker in report.by_broker.values()), key=_knowledge, default=None
    )
    return () if response is None else _quantiles(response.lease_seconds)


def _knowledge(response: environments_pb2.WatchPoolResponse) -> tuple[int, int]:
    return len(response.lease_seconds), response.granted_total


def _quantiles(quantiles: Sequence[plan_pb2.LeaseQuantile]) -> tuple[Quantile, ...]:
    return tuple(Quantile(each.share, each.seconds) for each in quantiles)
