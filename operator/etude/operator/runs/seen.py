"""What is known of a run when a decision is made; from caches alone."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from pydantic import ValidationError

from etude.common.api.kinds import Checkpoint, EnvPool, RLRun
from etude.operator import integrations, names
from etude.operator.cluster.api import Cluster
from etude.operator.conditions import Fact, holds
from etude.operator.desired import runs as desired
from etude.operator.manifests import (
    MADE_ONCE,
    Manifest,
    Ref,
    controller_uid,
    is_deleting,
    is_true,
    labels,
    ref,
    uid,
)
from etude.operator.reasons import Reason
from etude.operator.reports.latest import ReportBook, RunReport
from etude.operator.runs import model
from etude.operator.runs.mistrust import mistrusted
from etude.operator.runs.past import is_left


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A run's children, pools, checkpoints and newest report."""

    children: Mapping[Ref, Manifest] = field(default_factory=dict)
    """What the run controls, except checkpoints."""
    pods: Mapping[str, Sequence[Manifest]] = field(default_factory=dict)
    """Pods of the run's StatefulSets, by role; those on their way out too."""
    pools: Mapping[str, EnvPool] = field(default_factory=dict)
    """The pools that exist, by the environment that they serve."""
    checkpoints: Sequence[Checkpoint] = ()
    """Those of this run that are written, newest first; what it left comes last."""
    requests: Sequence[Checkpoint] = ()
    """Those that users asked for and that are not written yet, oldest first."""
    model: Checkpoint | None = None
    """The Checkpoint that its start weights come from."""
    named: frozenset[str] = frozenset()
    """Checkpoints that runs of the namespace start from."""
    sandboxes: int = 0
    """Environments that it leases, in all pools, as their brokers said last."""
    mistrusted: Mapping[str, float] = field(default_factory=dict)
    """Environments that came over those that it planned, by the pools that go by it no more."""
    report: RunReport = field(default_factory=RunReport)
    served: frozenset[str] = frozenset()
    """Kinds of other projects that the run asks for and that can be used."""
    flavors: Mapping[str, Manifest] = field(default_factory=dict)
    """ResourceFlavors by name, if the run waits for quota by a Workload."""
    priorities: Mapping[str, int] = field(default_factory=dict)
    """WorkloadPriorityClasses by name, likewise."""
    pod_priorities: Mapping[str, Manifest] = field(default_factory=dict)
    """PriorityClasses by name, likewise."""
    problem: Fact | None = None
    """What kept the last decision from being carried out."""
    refused: frozenset[Ref] = frozenset()
    """Children that the cluster took no change of."""

    @property
    def sets(self) -> list[Manifest]:
        """The role StatefulSets."""
        return [m for key, m in self.children.items() if key.kind == "StatefulSet"]

    @property
    def is_released(self) -> bool:
        """Whether nothing asks for pods any more."""
        return not any(map(asks_for_pods, self.children.values()))

    def newest_made(self, role: str) -> str | None:
        """When the newest pod of a role was made, by the API server's clock.

        None where a pod says itself of which attempt it is.
        """
        if any(labels(m).get(names.ROLE) == role for m in self.sets):
            return None
        made = (pod["metadata"].get("creationTimestamp") for pod in self.pods.get(role, ()))
        return max(filter(None, made), default=None)

    @property
    def is_gone(self) -> bool:
        """Whether no role pod is left."""
        return self.is_released and not any(self.pods.values())

    @property
    def last_saved(self) -> list[Checkpoint]:
        """Those of the step that was saved last; several if it was saved more than once.

        After a fall-back that is not the highest step. What the run left when it was put back may
        be of the same step, and says nothing of what it saved since.
        """
        saved = ((c.saved.branch, _made(c), c.saved.step) for c in self.checkpoints)
        branch, _, step = max(saved, default=(0, "", 0))
        return [c for c in self.checkpoints if (c.saved.branch, c.saved.step) == (branch, step)]

    @property
    def has_saved(self) -> bool:
        """Whether the last of what was saved has been read back, whatever came of it."""
        last = self.last_saved
        return any(is_ready(c) for c in last) or all(
            is_settled(c) or c.metadata.deletion_timestamp for c in last
        )

    @property
    def is_registered(self) -> bool:
        """Whether every checkpoint that was told of is an object."""
        return all(h.checkpoint is None for h in self.report.happenings)

    def ready(self, role: str, *, attempt: int) -> int:
        """Pods of this attempt of a role that are Ready."""
        return sum(
            is_true(pod, "Ready")
            for pod in self.pods.get(role, ())
            if labels(pod).get(names.ATTEMPT) == str(attempt) and not is_deleting(pod)
        )


def role_pods(cluster: Cluster, run: RLRun) -> dict[str, list[Manifest]]:
    """Pods of the run's workloads, by role; those on their way out too."""
    found: dict[str, list[Manifest]] = {}
    for workload in cluster.owned(run.metadata.uid):
        if workload["kind"] == "StatefulSet":
            pods = [p for p in cluster.owned(uid(workload)) if p["kind"] == "Pod"]
            found[labels(workload).get(names.ROLE, "")] = pods
        elif workload["kind"] in MADE_ONCE:
            for pod in _below(cluster, workload):
                role = labels(pod).get(names.ROLE, "")
                found.setdefault(role, []).append(_of_its_attempt(pod, role, run))
    return found


def _below(cluster: Cluster, owner: Manifest) -> Iterator[Manifest]:
    """The pods that an object makes, itself or by way of Jobs."""
    for each in cluster.owned(uid(owner)):
        if each["kind"] == "Pod":
            yield each
        elif each["kind"] == "Job":
            yield from _below(cluster, each)


def _of_its_attempt(pod: Manifest, role: str, run: RLRun) -> Manifest:
    """The pod as if its template had been changed for every attempt, which nobody did.

    Of the present attempt is what was made after it was decided on, by the API server's clock.
    """
    now = next((each for each in run.status.roles if each.name == role), None)
    if now is None:
        return pod
    is_older = now.after is not None and pod["metadata"].get("creationTimestamp", "") <= now.after
    attempt = str(max(0, now.attempt - 1) if is_older else now.attempt)
    metadata = {**pod["metadata"], "labels": {**labels(pod), names.ATTEMPT: attempt}}
    return {**pod, "metadata": metadata}


def asks_for_pods(child: Manifest) -> bool:
    """Whether a child of a run is there to have pods."""
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


def gather(
    cluster: Cluster,
    book: ReportBook,
    run: RLRun,
    problem: Fact | None,
    refused: frozenset[Ref] = frozenset(),
) -> Seen:
    """Everything that a decision about this run depends on."""
    owned = cluster.owned(run.metadata.uid)
    children = {ref(m): m for m in owned if m["kind"] != "Checkpoint"}
    every = [_checkpoint(m) for m in owned if m["kind"] == "Checkpoint"]
    found = [c for c in every if c is not None and _is_of(c, run)]
    pools = _pools(cluster, run)
    by_hand = run.spec.scheduling.admission == "Workload"
    flavors = cluster.every("ResourceFlavor") if by_hand else ()
    classes = cluster.every("WorkloadPriorityClass") if by_hand else ()
    of_pods = cluster.every("PriorityClass") if by_hand else ()
    return Seen(
        children=children,
        flavors={m["metadata"]["name"]: m for m in flavors},
        priorities={m["metadata"]["name"]: m["value"] for m in classes},
        pod_priorities={m["metadata"]["name"]: m for m in of_pods},
        pods=role_pods(cluster, run),
        pools=pools,
        model=_model(cluster, run),
        named=_named(cluster, run, len(found)),
        sandboxes=_sandboxes(book, run, pools.values()),
        mistrusted=mistrusted(book, run.metadata.uid, pools.values()),
        checkpoints=sorted(
            (c for c in found if c.saved.uri),
            key=lambda c: (not is_left(c, run.status.resumption), c.saved.step, is_ready(c)),
            reverse=True,
        ),
        requests=sorted(
            (c for c in found if not c.saved.uri and not c.metadata.deletion_timestamp),
            key=lambda c: (c.metadata.creation_timestamp or "", c.metadata.name),
        ),
        report=book.run(run.metadata.uid),
        served=cluster.served(integrations.asked(integrations.needs(run))),
        problem=problem,
        refused=refused,
    )


def _pools(cluster: Cluster, run: RLRun) -> dict[str, EnvPool]:
    pools = {}
    for role in run.spec.roles.environments:
        key = Ref("EnvPool", run.metadata.namespace, desired.pool_name(run, role))
        manifest = cluster.get(key)
        is_own = manifest is not None and controller_uid(manifest) == run.metadata.uid
        if manifest is not None and (is_own or role.pool_ref is not None):
            # What no schema of ours takes is told in the pool's own status.
            with suppress(ValidationError):
                pools[role.name] = EnvPool.understood(manifest)
    return pools


def _named(cluster: Cluster, run: RLRun, num_checkpoints: int) -> frozenset[str]:
    """What may not be superseded; nobody asks every run about it while nothing can be."""
    if num_checkpoints <= run.spec.checkpointing.keep_last:
        return frozenset()
    return model.named(cluster, run.metadata.namespace)


def _model(cluster: Cluster, run: RLRun) -> Checkpoint | None:
    about = run.spec.model.checkpoint_ref
    if about is None:
        return None
    found = cluster.get(Ref("Checkpoint", run.metadata.namespace, about.name))
    return None if found is None else _checkpoint(found)


def _sandboxes(book: ReportBook, run: RLRun, pools: Iterable[EnvPool]) -> int:
    """Leases of the run; a pool that serves two of its environments is counted once."""
    said = (book.pool(uid).newest for uid in {pool.metadata.uid for pool in pools})
    return sum(each.leased_by_run.get(run.metadata.uid, 0) for each in said if each is not None)


def _checkpoint(manifest: Manifest) -> Checkpoint | None:
    """The checkpoint, or nothing if a newer operator wrote what this one cannot read."""
    try:
        return Checkpoint.understood(manifest)
    except ValidationError:
        return None


def _is_of(checkpoint: Checkpoint, run: RLRun) -> bool:
    """Whether it names the run; whoever may make a checkpoint may write any owner on it."""
    about = checkpoint.spec.run_ref
    return about is not None and about.name == run.metadata.name


def _made(checkpoint: Checkpoint) -> str:
    return checkpoint.metadata.creation_timestamp or ""


def is_ready(checkpoint: Checkpoint) -> bool:
    """Whether a run can resume from it."""
    return holds(checkpoint.status.conditions, "Ready")


def ready_fact(checkpoint: Checkpoint) -> Fact | None:
    """What is known of its data; None before anybody looked at it."""
    found = (c for c in checkpoint.status.conditions if c.type == "Ready")
    return next((Fact(c.type, c.status == "True", c.reason, c.message) for c in found), None)


def is_corrupt(checkpoint: Checkpoint) -> bool:
    """Whether its data is wrong, and will stay wrong."""
    fact = ready_fact(checkpoint)
    return fact is not None and fact.reason == Reason.CORRUPT


def is_settled(checkpoint: Checkpoint) -> bool:
    """Whether its data was read back, whatever came of it."""
    return is_ready(checkpoint) or is_corrupt(checkpoint)


def is_available(pool: EnvPool) -> bool:
    """Whether a pool hands out environments."""
    return holds(pool.status.conditions, "Available")
