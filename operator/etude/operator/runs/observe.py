"""Observed state of a run, from caches alone."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from etude.common.api.kinds import Checkpoint, EnvPool, RLRun
from etude.operator import names
from etude.operator.builders import run_spec
from etude.operator.checkpoints.status import is_ready, is_verification_over
from etude.operator.conditions import ConditionFact, is_condition_true
from etude.operator.integrations import apis
from etude.operator.kube.interface import Cluster, read_object
from etude.operator.manifests import (
    CREATE_ONLY,
    Manifest,
    Ref,
    controller_uid,
    is_deleting,
    is_true,
    labels,
    parse_object,
    ref,
    uid,
)
from etude.operator.remotes.report_store import ReportStore, RunReport
from etude.operator.runs.capacity.lenders import find_lenders
from etude.operator.runs.capacity.plan_accuracy import inaccurate_plans
from etude.operator.runs.checkpoints import start_weights
from etude.operator.runs.checkpoints.lineage import is_off_lineage


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueObjects:
    """Cluster-wide objects that Kueue admits by, of a run with a Workload; empty for others."""

    flavors: Mapping[str, Manifest] = field(default_factory=dict)
    """ResourceFlavors by name."""
    priorities: Mapping[str, int] = field(default_factory=dict)
    """Values of WorkloadPriorityClasses by name."""
    pod_priorities: Sequence[Manifest] = ()
    """PriorityClasses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedRun:
    """Children, pods, pools, checkpoints and newest report of a run."""

    children: Mapping[Ref, Manifest] = field(default_factory=dict)
    """Objects that the run controls, except checkpoints."""
    pods: Mapping[str, Sequence[Manifest]] = field(default_factory=dict)
    """Pods of the run's workloads, by role, terminating ones included."""
    pools: Mapping[str, EnvPool] = field(default_factory=dict)
    """Existing pools, by the environment that they serve."""
    checkpoints: Sequence[Checkpoint] = ()
    """Written checkpoints of this run, newest first; those off its lineage come last."""
    requests: Sequence[Checkpoint] = ()
    """Requested checkpoints that are not written yet, oldest first."""
    model: Checkpoint | None = None
    """The Checkpoint of its start weights."""
    has_namesake: bool = False
    """An EvalRun with the name of the run has children."""
    start_sources: frozenset[str] = frozenset()
    """Checkpoints that runs of the namespace start from."""
    sandboxes: int = 0
    """Environments that it leases in all pools, by the brokers' newest reports."""
    plan_ratios: Mapping[str, float] = field(default_factory=dict)
    """Ratio of requested to planned environments, by the pools that ignore its plan."""
    lenders: Sequence[str] = ()
    """Engines of routes that may lend to it, each host:port."""
    report: RunReport = field(default_factory=RunReport)
    served: frozenset[str] = frozenset()
    """Served kinds of other projects that the run needs."""
    queue: QueueObjects = field(default_factory=QueueObjects)
    problem: ConditionFact | None = None
    """The rejection that kept the last decision from being carried out."""
    rejected: frozenset[Ref] = frozenset()
    """Children whose change the cluster rejected."""

    @property
    def stateful_sets(self) -> list[Manifest]:
        """The role StatefulSets."""
        return [m for key, m in self.children.items() if key.kind == "StatefulSet"]

    @property
    def is_released(self) -> bool:
        """No child asks for pods."""
        return not any(map(asks_for_pods, self.children.values()))

    def newest_pod_created(self, role: str) -> str | None:
        """Creation time of the newest pod of a role, by the API server's clock.

        None where pods carry their attempt as a label.
        """
        if any(labels(m).get(names.ROLE) == role for m in self.stateful_sets):
            return None
        made = (pod["metadata"].get("creationTimestamp") for pod in self.pods.get(role, ()))
        return max(filter(None, made), default=None)

    @property
    def has_no_pods(self) -> bool:
        """No role pod is left."""
        return self.is_released and not any(self.pods.values())

    @property
    def last_saved_checkpoints(self) -> list[Checkpoint]:
        """Checkpoints of the step that was saved last; several if it was saved more than once.

        After a resume from an earlier one that is not the highest step. Checkpoints off the lineage
        may be of the same step, and do not count.
        """
        saved = (
            (c.saved_state.branch, _created_at(c), c.saved_state.step) for c in self.checkpoints
        )
        branch, _, step = max(saved, default=(0, "", 0))
        return [
            c
            for c in self.checkpoints
            if (c.saved_state.branch, c.saved_state.step) == (branch, step)
        ]

    @property
    def has_saved(self) -> bool:
        """The last saved checkpoint has been verified, with either result."""
        last = self.last_saved_checkpoints
        return any(is_ready(c) for c in last) or all(
            is_verification_over(c) or c.metadata.deletion_timestamp for c in last
        )

    @property
    def is_registered(self) -> bool:
        """Every reported checkpoint is registered as an object."""
        return all(h.checkpoint is None for h in self.report.pending)

    def num_ready(self, role: str, *, attempt: int) -> int:
        """Pods of this attempt of a role that are Ready."""
        return sum(
            is_true(pod, "Ready")
            for pod in self.pods.get(role, ())
            if labels(pod).get(names.ATTEMPT) == str(attempt) and not is_deleting(pod)
        )


def role_pods(cluster: Cluster, run: RLRun) -> dict[str, list[Manifest]]:
    """Pods of the run's workloads, by role, terminating ones included."""
    pods_of_roles: dict[str, list[Manifest]] = {}
    for workload in cluster.list_owned(run.metadata.uid):
        if workload["kind"] == "StatefulSet":
            pods = [p for p in cluster.list_owned(uid(workload)) if p["kind"] == "Pod"]
            pods_of_roles[labels(workload).get(names.ROLE, "")] = pods
        elif workload["kind"] in CREATE_ONLY:
            for pod in _pods_below(cluster, workload):
                role = labels(pod).get(names.ROLE, "")
                pods_of_roles.setdefault(role, []).append(_with_attempt_label(pod, role, run))
    return pods_of_roles


def _pods_below(cluster: Cluster, owner: Manifest) -> Iterator[Manifest]:
    """Pods that an object owns, directly or through Jobs."""
    for each in cluster.list_owned(uid(owner)):
        if each["kind"] == "Pod":
            yield each
        elif each["kind"] == "Job":
            yield from _pods_below(cluster, each)


def _with_attempt_label(pod: Manifest, role: str, run: RLRun) -> Manifest:
    """The pod with an attempt label, which the template of a fixed workload cannot carry.

    A pod created after the present attempt was decided, by the API server's clock, belongs to it.
    """
    now = next((each for each in run.status.roles if each.name == role), None)
    if now is None:
        return pod
    is_older = now.after is not None and pod["metadata"].get("creationTimestamp", "") <= now.after
    attempt = str(max(0, now.attempt - 1) if is_older else now.attempt)
    metadata = {**pod["metadata"], "labels": {**labels(pod), names.ATTEMPT: attempt}}
    return {**pod, "metadata": metadata}


def asks_for_pods(child: Manifest) -> bool:
    """A child of a run asks for pods."""
    if is_deleting(child):
        return False
    match child["kind"]:
        case "StatefulSet" | "EnvPool":
            return bool(child["spec"].get("replicas", 1))
        case "JobSet":
            return not child["spec"].get("suspend", False)
        case "RayCluster":
            return True
        case _:
            return False


def observe_run(
    cluster: Cluster,
    reports: ReportStore,
    run: RLRun,
    problem: ConditionFact | None,
    rejected: frozenset[Ref] = frozenset(),
) -> ObservedRun:
    """Everything that a decision about this run depends on."""
    owned = cluster.list_owned(run.metadata.uid)
    children = {ref(m): m for m in owned if m["kind"] != "Checkpoint"}
    readable = [parse_object(Checkpoint, m) for m in owned if m["kind"] == "Checkpoint"]
    checkpoints = [c for c in readable if c is not None and _names_run(c, run)]
    pools = _pools(cluster, run)
    return ObservedRun(
        children=children,
        queue=_queue_objects(cluster, run),
        pods=role_pods(cluster, run),
        pools=pools,
        model=_model(cluster, run),
        has_namesake=_has_namesake(cluster, run),
        start_sources=_start_sources(cluster, run, len(checkpoints)),
        sandboxes=_sandboxes(reports, run, pools.values()),
        plan_ratios=inaccurate_plans(reports, run.metadata.uid, pools.values()),
        checkpoints=sorted(
            (c for c in checkpoints if c.saved_state.uri),
            key=lambda c: (
                not is_off_lineage(c, run.status.resumption),
                c.saved_state.step,
                is_ready(c),
            ),
            reverse=True,
        ),
        requests=sorted(
            (c for c in checkpoints if not c.saved_state.uri and not c.metadata.deletion_timestamp),
            key=lambda c: (c.metadata.creation_timestamp or "", c.metadata.name),
        ),
        lenders=find_lenders(cluster, run),
        report=reports.run(run.metadata.uid),
        served=cluster.usable_kinds(apis.needed_kinds(apis.run_needs(run))),
        problem=problem,
        rejected=rejected,
    )


def _queue_objects(cluster: Cluster, run: RLRun) -> QueueObjects:
    if run.spec.scheduling.admission != "Workload":
        return QueueObjects()
    classes = cluster.list_objects("WorkloadPriorityClass")
    return QueueObjects(
        flavors={m["metadata"]["name"]: m for m in cluster.list_objects("ResourceFlavor")},
        priorities={m["metadata"]["name"]: m["value"] for m in classes},
        pod_priorities=list(cluster.list_objects("PriorityClass")),
    )


def _has_namesake(cluster: Cluster, run: RLRun) -> bool:
    """True if an evaluation of this name has children; one that waits leaves the name to the run.

    Also once it is over: its Services stay with it.
    """
    found = cluster.get(Ref("EvalRun", run.metadata.namespace, run.metadata.name))
    return found is not None and bool(cluster.list_owned(uid(found)))


def _pools(cluster: Cluster, run: RLRun) -> dict[str, EnvPool]:
    pools = {}
    for role in run.spec.roles.environments:
        key = Ref("EnvPool", run.metadata.namespace, run_spec.pool_name(run, role))
        manifest = cluster.get(key)
        is_own = manifest is not None and controller_uid(manifest) == run.metadata.uid
        pool = parse_object(EnvPool, manifest)
        if pool is not None and (is_own or role.pool_ref is not None):
            pools[role.name] = pool
    return pools


def _start_sources(cluster: Cluster, run: RLRun, num_checkpoints: int) -> frozenset[str]:
    """Checkpoints that retention must keep; looked up only once there are too many."""
    if num_checkpoints <= run.spec.checkpointing.keep_last:
        return frozenset()
    return start_weights.start_sources(cluster, run.metadata.namespace)


def _model(cluster: Cluster, run: RLRun) -> Checkpoint | None:
    about = run.spec.model.checkpoint_ref
    if about is None:
        return None
    return read_object(cluster, Checkpoint, run.metadata.namespace, about.name)


def _sandboxes(book: ReportStore, run: RLRun, pools: Iterable[EnvPool]) -> int:
    """Leases of the run; a pool that serves two of its environments is counted once."""
    said = (book.pool(uid).newest for uid in {pool.metadata.uid for pool in pools})
    return sum(each.leased_by_run.get(run.metadata.uid, 0) for each in said if each is not None)


def _names_run(checkpoint: Checkpoint, run: RLRun) -> bool:
    """The checkpoint names the run; its owner references may be forged."""
    about = checkpoint.spec.run_ref
    return about is not None and about.name == run.metadata.name


def _created_at(checkpoint: Checkpoint) -> str:
    return checkpoint.metadata.creation_timestamp or ""


def is_available(pool: EnvPool) -> bool:
    """A pool hands out environments."""
    return is_condition_true(pool.status.conditions, "Available")
