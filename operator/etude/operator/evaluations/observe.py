"""Observed state of an evaluation, from caches alone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from etude.common.api.kinds import Checkpoint, EnvPool, EvalRun, RLRun
from etude.operator import names
from etude.operator.conditions import ConditionFact
from etude.operator.evaluations.children import job_ref
from etude.operator.integrations import cert_manager
from etude.operator.kube.interface import Cluster, read_object
from etude.operator.manifests import Manifest, Ref, labels, ref, uid


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedEvaluation:
    """Everything that a decision about an evaluation depends on."""

    checkpoint: Checkpoint | None = None
    run: RLRun | None = None
    """The run that wrote the checkpoint, or whose rewards and store an endpoint is graded with."""
    namesake: bool = False
    """A run of the namespace has the name of the evaluation."""
    pools: Mapping[str, EnvPool] = field(default_factory=dict)
    """By environment; without those that do not exist."""
    baseline: EvalRun | None = None
    children: Mapping[Ref, Manifest] = field(default_factory=dict)
    pods: Sequence[Manifest] = ()
    """Pods of engines and rewards."""
    job_pods: Sequence[Manifest] = ()
    served: frozenset[str] = frozenset()
    """Kinds of cert-manager that can be used now."""
    problem: ConditionFact | None = None
    """The rejection that kept the last decision from being carried out."""


def observe_evaluation(
    cluster: Cluster, evaluation: EvalRun, problem: ConditionFact | None
) -> ObservedEvaluation:
    """Observe an evaluation, the objects that it names, and its children."""
    namespace = evaluation.metadata.namespace
    spec = evaluation.spec
    children = {ref(m): m for m in cluster.list_owned(evaluation.metadata.uid)}
    job = children.get(job_ref(evaluation))
    sets = [m for key, m in children.items() if key.kind == "StatefulSet"]
    named = spec.checkpoint_ref
    checkpoint = None if named is None else read_object(cluster, Checkpoint, namespace, named.name)
    comparison = spec.comparison
    return ObservedEvaluation(
        checkpoint=checkpoint,
        run=_run_of(cluster, checkpoint)
        if spec.run_ref is None
        else read_object(cluster, RLRun, namespace, spec.run_ref.name),
        namesake=cluster.get(Ref("RLRun", namespace, evaluation.metadata.name)) is not None,
        pools={
            each.name: pool
            for each in spec.environments
            if (pool := read_object(cluster, EnvPool, namespace, each.pool_ref.name))
        },
        baseline=None
        if comparison is None
        else read_object(cluster, EvalRun, namespace, comparison.baseline_ref.name),
        children=children,
        pods=[pod for each in sets for pod in cluster.list_owned(uid(each))],
        job_pods=[] if job is None else list(cluster.list_owned(uid(job))),
        served=cluster.usable_kinds((cert_manager.CERTIFICATE,)),
        problem=problem,
    )


def _run_of(cluster: Cluster, checkpoint: Checkpoint | None) -> RLRun | None:
    """The run that wrote a checkpoint; None if it is gone, or another has its name."""
    about = checkpoint.spec.run_ref if checkpoint is not None else None
    if checkpoint is None or about is None:
        return None
    run = read_object(cluster, RLRun, checkpoint.metadata.namespace, about.name)
    return None if run is None or about.uid not in {None, run.metadata.uid} else run


def evaluation_of(child: Manifest) -> str | None:
    """Name of the evaluation that a child belongs to."""
    return labels(child).get(names.EVALUATION)
