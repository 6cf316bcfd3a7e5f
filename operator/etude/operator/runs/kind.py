"""The kind RLRun."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from typing_extensions import override

from etude.common.api.kinds import RLRun
from etude.common.api.run import lifecycle
from etude.common.api.run.status import RLRunStatus
from etude.common.api.schema import crd
from etude.operator import metrics, names
from etude.operator.actions import Decision
from etude.operator.builders.addresses import role_address
from etude.operator.builders.platform import Platform
from etude.operator.builders.run import RunShape, run_children
from etude.operator.clock import parse_rfc3339
from etude.operator.kind import KindContext, KindReconciler, PassInput, ResourceKind
from etude.operator.manifests import Manifest, Ref, is_true, labels, ref
from etude.operator.metrics import ConditionMetric
from etude.operator.pod_failures import pods_of_attempt
from etude.operator.remotes.followers import ReportSource
from etude.operator.remotes.report_store import ReportPosition
from etude.operator.runs import decide, observe
from etude.operator.runs.checkpoints import start_weights
from etude.operator.runs.lifecycle import transitions


@dataclass(slots=True)
class RunGauges:
    """Metrics of single runs."""

    _conditions: ConditionMetric = field(default_factory=ConditionMetric)

    def export(self, run: RLRun) -> None:
        about = (run.metadata.namespace, run.metadata.name)
        status = run.status
        self._conditions.export(Ref("RLRun", *about), status.conditions)
        if status.step is not None:
            metrics.RUN_STEP.labels(*about).set(status.step.current)
        if status.ettr is not None:
            metrics.RUN_ETTR.labels(*about).set(float(status.ettr))
        if status.staleness is not None:
            metrics.RUN_STALENESS.labels(*about).set(status.staleness.max)
        for role in status.roles:
            metrics.RUN_PODS.labels(*about, role.name, "desired").set(role.desired)
            metrics.RUN_PODS.labels(*about, role.name, "ready").set(role.ready)

    def remove(self, key: Ref) -> None:
        about = (key.namespace, key.name)
        for gauge in (metrics.RUN_STEP, metrics.RUN_ETTR, metrics.RUN_STALENESS):
            gauge.remove(*about)
        metrics.RUN_PODS.remove_by_labels({"namespace": key.namespace, "run": key.name})
        self._conditions.remove(key)


@dataclass(slots=True)
class RunReconciler(KindReconciler[RLRun, RLRunStatus]):
    """Observes runs, follows their controllers, decides."""

    context: KindContext
    _gauges: RunGauges = field(default_factory=RunGauges)

    @override
    def decide(
        self, resource: RLRun, manifest: Manifest, inputs: PassInput
    ) -> Decision[RLRunStatus]:
        run, reports = resource, self.context.reports
        uid = run.metadata.uid
        if run.spec.managed_by != lifecycle.OPERATOR:
            self.context.followers.unfollow_object(uid)
            return Decision(status=run.status)
        reported = run.status.reported
        # A restarted operator asks for the reports after this position.
        reports.acknowledge(uid, ReportPosition(reported.epoch, reported.sequence))
        self._follow(run, manifest)
        observed = observe.observe_run(
            self.context.cluster, reports, run, inputs.problem, inputs.rejected
        )
        if run.spec.suspend and run.status.intent is None and observed.has_no_pods:
            reports.record_pod_deleted(uid)
        self._gauges.export(run)
        return decide.decide(run, observed, inputs.now, inputs.platform)

    @override
    def forget(self, key: Ref, uid: str) -> None:
        self._gauges.remove(key)

    def _follow(self, run: RLRun, manifest: Manifest) -> None:
        """Follow the reports of the controller of the present attempt."""
        attempt = transitions.attempts_of(run).get(names.TRAINER, 0)
        pods = observe.role_pods(self.context.cluster, run).get(names.TRAINER, ())
        controllers = [pod for pod in pods if labels(pod).get(names.RAY_NODE) != "worker"]
        self.context.followers.follow_ready_pod(
            ref(manifest),
            ReportSource(run.metadata.uid),
            role_address(run, names.TRAINER),
            pods_of_attempt(controllers, attempt),
        )


def _children(run: RLRun, platform: Platform) -> list[Manifest]:
    return run_children(run, RunShape(images=platform.images), platform)


def _references(run: Manifest) -> Iterator[Ref]:
    """Pools and checkpoints that a run names, and the evaluation that may have its name."""
    namespace, name = ref(run).namespace, ref(run).name
    yield Ref("EvalRun", namespace, name)
    for role in run["spec"].get("roles", {}).get("environments") or ():
        pool = (role.get("poolRef") or {}).get("name")
        if pool:
            yield Ref("EnvPool", namespace, pool)
    for name in start_weights.referenced_checkpoints(run):
        yield Ref("Checkpoint", namespace, name)


def _restore(run: Manifest, written_s: float) -> Manifest:
    """The run as a new local runtime continues it.

    A killed runtime held pods until its last write. A failed run is retried from its last
    checkpoint, and a hold ends: the user who starts it again has fixed the cause.
    """
    if is_true(run, "Complete"):
        return run
    status = {key: value for key, value in run.get("status", {}).items() if key != "hold"}
    active = dict(status.get("active", {}))
    if "since" in active:
        held_s = max(0.0, written_s - parse_rfc3339(active.pop("since")))
        active["seconds"] = active.get("seconds", 0.0) + held_s
    if not is_true(run, "Failed"):
        return {**run, "status": {**status, "active": active}}
    lasting = ("attempt", "startTime", "resolved", "resumption")
    kept = {key: status[key] for key in lasting if key in status}
    return {**run, "status": {**kept, "active": active}}


RLRUN = ResourceKind(
    definition=crd.RLRUN,
    model=RLRun,
    status=RLRunStatus,
    reconciler=RunReconciler,
    children=_children,
    owner_of=lambda child: labels(child).get(names.RUN),
    references=_references,
    restore=_restore,
)
