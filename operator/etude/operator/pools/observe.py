"""Observed state of a pool, from caches alone."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from etude.common.api.kinds import EnvPool
from etude.common.api.pool.autoscaling import ScalingMode
from etude.common.api.pool.backend import Backend
from etude.operator import names
from etude.operator.conditions import ConditionFact
from etude.operator.integrations import apis
from etude.operator.kube.interface import Cluster
from etude.operator.manifests import Manifest, Ref, is_true, labels, ref, uid
from etude.operator.pools import agent_sandbox
from etude.operator.pools.size import PoolSize
from etude.operator.remotes.report_store import PoolReport, ReportStore

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
    size: PoolSize | None = None
    """What the pool's sizer says; without one, what the spec asks for."""
    problem: ConditionFact | None = None
    """The rejection that kept the last decision from being carried out."""


def observe_pool(
    cluster: Cluster, book: ReportStore, pool: EnvPool, problem: ConditionFact | None
) -> ObservedPool:
    """Everything that a decision about this pool depends on."""
    report = book.pool(pool.metadata.uid)
    children = {ref(m): m for m in cluster.list_owned(pool.metadata.uid)}
    sets = {
        labels(m).get(names.ROLE, ""): cluster.list_owned(uid(m))
        for m in children.values()
        if m["kind"] == "StatefulSet"
    }
    return ObservedPool(
        children=children,
        hosts=list(_hosts(cluster, pool, children)),
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


def _sandbox_template(cluster: Cluster, pool: EnvPool) -> Manifest | None:
    named = pool.spec.sandbox_template_ref
    if named is None:
        return None
    return cluster.get(Ref("SandboxTemplate", pool.metadata.namespace, named.name))


def _gpus_by_run(cluster: Cluster, pool: EnvPool, report: PoolReport) -> dict[str, int | None]:
    """GPUs by planning run, looked up one by one: scanning a large namespace dominated a pass."""
    told = {plan.run_id for words in report.by_broker.values() for plan in words.response.plans}
    found = {run_id: cluster.get_by_uid(run_id) for run_id in told}
    return {
        run_id: None if _is_inactive(run) else _gpus(run)
        for run_id, run in found.items()
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
