"""Decision about one checkpoint: verify its data once, delete the data before the object."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from etude.common.api.checkpoint.status import CheckpointStatus
from etude.common.api.kinds import Checkpoint, RLRun
from etude.common.checkpoints.job import EXIT_CORRUPT
from etude.operator import names
from etude.operator.actions import Apply, ClockReading, Decision, Delete, RecordEvent, SetFinalizers
from etude.operator.builders import network_policies
from etude.operator.builders.jobset import QUEUE_LABEL
from etude.operator.builders.platform import Platform
from etude.operator.checkpoints import job as checkpoints_job
from etude.operator.checkpoints import requests
from etude.operator.checkpoints.job import DELETE, VERIFY
from etude.operator.checkpoints.job_slots import JobSlots, PendingJobs
from etude.operator.checkpoints.status import (
    checkpoint_status,
    is_verification_over,
    ready_condition,
)
from etude.operator.clock import parse_rfc3339
from etude.operator.conditions import ConditionFact, false_condition, true_condition
from etude.operator.kube.interface import Cluster, NamespaceClosingError, read_object
from etude.operator.kube.workload_controllers import JOB_COMPLETE, JOB_FAILED
from etude.operator.manifests import (
    Manifest,
    Ref,
    condition,
    controller_uid,
    is_deleting,
    is_true,
    labels,
    ref,
    stamp_digest,
    uid,
)
from etude.operator.pod_failures import (
    CRASHES,
    PULL_FAILURES,
    PodFailure,
    find_failures,
    unschedulable_message,
    waiting_message,
)
from etude.operator.reasons import Reason

SLOT_POLL_S = 5.0
"""Time between two passes of a checkpoint that waits for a free Job slot."""
RETRY_S = 60.0
"""Time between two Jobs for a store that is down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedCheckpoint:
    """Observed state of a checkpoint, from caches alone."""

    manifest: Manifest = field(default_factory=dict)
    """The object as it was read, for writes with its resourceVersion."""
    jobs: dict[str, Manifest] = field(default_factory=dict)
    """Its Jobs by action."""
    endings: dict[str, PodFailure] = field(default_factory=dict)
    """The last failed pod of each Job, by action."""
    troubles: dict[str, str] = field(default_factory=dict)
    """The reason why the pod of each Job does not start, by action."""
    is_namespace_closing: bool = False
    """The namespace rejected a Job because it is terminating."""
    run: RLRun | None = None
    """The run that a request, or a checkpoint with verify: Load, names."""
    policies: frozenset[str] = frozenset()
    """Names of NetworkPolicies of its Jobs."""
    needs_egress_policy: bool = False
    """No run has the NetworkPolicy that allows egress of its Jobs."""
    problem: ConditionFact | None = None
    """The rejection that kept the last decision from being carried out."""
    slots: JobSlots = field(default_factory=JobSlots)
    """Job slots of its namespace."""


def observe_checkpoint(
    cluster: Cluster, checkpoint: Checkpoint, problem: ConditionFact | None, underway: PendingJobs
) -> ObservedCheckpoint:
    """Everything that a decision about this checkpoint depends on."""
    namespace, name = checkpoint.metadata.namespace, checkpoint.metadata.name
    existing: dict[str, Manifest] = {}
    endings: dict[str, PodFailure] = {}
    troubles: dict[str, str] = {}
    for what in (VERIFY, DELETE):
        job = cluster.get(Ref("Job", namespace, checkpoints_job.job_name(checkpoint, what)))
        if job is not None:
            existing[what] = job
            pods = cluster.list_owned(uid(job))
            ended = find_failures(names.JANITOR, pods)
            if ended:
                endings[what] = ended[-1]
            troubles[what] = _suspension(job) or _trouble(pods)
    return ObservedCheckpoint(
        manifest=cluster.get(Ref("Checkpoint", namespace, name)) or {},
        jobs=existing,
        endings=endings,
        troubles=troubles,
        run=_run(cluster, checkpoint),
        policies=frozenset(
            ref(job).name
            for job in existing.values()
            if cluster.get(Ref("NetworkPolicy", namespace, ref(job).name)) is not None
        ),
        needs_egress_policy=_needs_egress_policy(cluster, checkpoint),
        is_namespace_closing=(
            problem is not None and problem.reason == NamespaceClosingError.reason
        ),
        problem=problem,
        slots=underway.job_slots(cluster, namespace),
    )


def _run(cluster: Cluster, checkpoint: Checkpoint) -> RLRun | None:
    """The run of a checkpoint; None if it is missing or its spec is invalid."""
    about = checkpoint.spec.run_ref
    is_needed = _is_request(checkpoint) or checkpoint.spec.verify == "Load"
    if about is None or not is_needed:
        return None
    return read_object(cluster, RLRun, checkpoint.metadata.namespace, about.name)


def _needs_egress_policy(cluster: Cluster, checkpoint: Checkpoint) -> bool:
    """The checkpoint's Jobs need a NetworkPolicy of their own, as its run has none.

    A run that is deleted in the foreground loses its policies first, and waits for its checkpoints.
    """
    about = checkpoint.spec.run_ref
    namespace = checkpoint.metadata.namespace
    run = None if about is None else cluster.get(Ref("RLRun", namespace, about.name))
    if about is None or run is None:
        return True
    if run["spec"].get("network", {}).get("policy") == "Unmanaged":
        return False
    policy = cluster.get(Ref("NetworkPolicy", namespace, names.child(about.name, names.JANITOR)))
    is_there = policy is not None and controller_uid(policy) == uid(run)
    return is_deleting(run) or not is_there


def _is_request(checkpoint: Checkpoint) -> bool:
    return not checkpoint.saved_state.uri


def _suspension(job: Manifest) -> str:
    """The sentence about a Job that a queue has suspended; empty if it is not suspended."""
    if not job["spec"].get("suspend", False):
        return ""
    queue = labels(job).get(QUEUE_LABEL)
    by = f"LocalQueue {queue}" if queue else "another controller"
    return f"{by} has suspended Job {ref(job).name}: exclude the operator's Jobs from that queue"


def _trouble(pods: Sequence[Manifest]) -> str:
    """The reason why the pod of a Job does not start; empty while it may."""
    return waiting_message(pods, PULL_FAILURES | CRASHES) or unschedulable_message(pods)


def decide(
    checkpoint: Checkpoint, observed: ObservedCheckpoint, now: ClockReading, platform: Platform
) -> Decision[CheckpointStatus]:
    """One pass over one checkpoint. No I/O, no clock."""
    if checkpoint.metadata.deletion_timestamp:
        return _deletion(checkpoint, observed, now, platform)
    if _is_request(checkpoint):
        return requests.decide(checkpoint, observed.manifest, observed.run, now)
    held = names.CHECKPOINT_DATA in checkpoint.metadata.finalizers
    if checkpoint.spec.deletion_policy == "Delete" and not held:
        finalizers = (*checkpoint.metadata.finalizers, names.CHECKPOINT_DATA)
        return Decision(
            status=checkpoint.status,
            actions=(SetFinalizers(observed=observed.manifest, finalizers=finalizers),),
        )
    if is_verification_over(checkpoint):
        return Decision(
            status=_recorded_status(checkpoint, now), actions=_delete_job(observed, VERIFY)
        )
    return _verification(checkpoint, observed, now, platform)


def _recorded_status(checkpoint: Checkpoint, now: ClockReading) -> CheckpointStatus:
    """The recorded result for the present spec: a pin does not change it."""
    known = ready_condition(checkpoint)
    return checkpoint.status if known is None else checkpoint_status(checkpoint, known, now)


def _verification(
    checkpoint: Checkpoint, observed: ObservedCheckpoint, now: ClockReading, platform: Platform
) -> Decision[CheckpointStatus]:
    """Read the checkpoint's objects back once, in a Job."""
    job = observed.jobs.get(VERIFY)
    recorded = ready_condition(checkpoint)
    if recorded is None or recorded.reason != Reason.STORAGE_UNAVAILABLE:  # holds until it is read
        words = observed.troubles.get(VERIFY) or "its objects are read back"
        recorded = false_condition("Ready", Reason.VERIFYING, words)
    verifying = checkpoint_status(checkpoint, recorded, now)
    if job is None:
        beginning = _start_job(
            observed, checkpoints_job.data_job(checkpoint, observed.run, VERIFY, platform), now
        )
        if not beginning:
            return Decision(status=verifying, requeue_after_s=SLOT_POLL_S)
        status = (
            verifying
            if observed.problem is None
            else checkpoint_status(checkpoint, _rejection(observed), now)
        )
        return Decision(status=status, actions=beginning)
    if is_true(job, JOB_COMPLETE):
        return Decision(
            status=checkpoint_status(
                checkpoint, true_condition("Ready", Reason.CHECKPOINT_VERIFIED), now
            )
        )
    if not is_true(job, JOB_FAILED):
        actions = tuple(_egress_policies(checkpoint, observed, job, platform))
        return Decision(status=verifying, actions=actions, requeue_after_s=RETRY_S)
    ending = observed.endings.get(VERIFY)
    if ending is not None and ending.exit_code == EXIT_CORRUPT:
        return Decision(
            status=checkpoint_status(
                checkpoint, false_condition("Ready", Reason.CORRUPT, ending.message), now
            )
        )
    fact = false_condition("Ready", Reason.STORAGE_UNAVAILABLE, ending.message if ending else "")
    return _retry(checkpoint_status(checkpoint, fact, now), observed, VERIFY, now)


def _start_job(
    observed: ObservedCheckpoint, job: Apply, now: ClockReading
) -> tuple[Apply | Delete, ...]:
    """Creation of its Job, perhaps in the slot of an unschedulable one; empty without a slot."""
    if observed.slots.is_free:
        return (job,)
    late = observed.slots.expired_job(now.wall_s)
    # A rejected Job may be rejected again, and would take one slot after the other.
    if late is None or observed.problem is not None:
        return ()
    return (Delete(ref=ref(late), uid=uid(late)), job)


def _rejection(observed: ObservedCheckpoint) -> ConditionFact:
    assert observed.problem is not None, "asked for without one"  # noqa: S101 - our own mistake
    return false_condition("Ready", observed.problem.reason, observed.problem.message)


def _deletion(
    checkpoint: Checkpoint, observed: ObservedCheckpoint, now: ClockReading, platform: Platform
) -> Decision[CheckpointStatus]:
    """Delete the data first, then the object, which its finalizer holds."""
    if names.CHECKPOINT_DATA not in checkpoint.metadata.finalizers:
        return Decision(status=checkpoint.status)
    release = _remove_finalizer(checkpoint, observed)
    if checkpoint.spec.deletion_policy == "Retain" or _is_request(checkpoint):
        return Decision(status=checkpoint.status, actions=(release,))
    if observed.is_namespace_closing:
        where = (
            f"{checkpoint.saved_state.uri} stays in the store: delete it there if it is not needed"
        )
        note = RecordEvent(
            name="orphaned", reason=Reason.DATA_ORPHANED, message=where, is_warning=True
        )
        return Decision(status=checkpoint.status, actions=(note, release))
    return _deletion_by_job(checkpoint, observed, now, platform)


def _deletion_by_job(
    checkpoint: Checkpoint, observed: ObservedCheckpoint, now: ClockReading, platform: Platform
) -> Decision[CheckpointStatus]:
    job = observed.jobs.get(DELETE)
    if job is None:
        fact = false_condition("Ready", Reason.DELETING, "its objects are being deleted")
        fact = fact if observed.problem is None else _rejection(observed)
        status = checkpoint_status(checkpoint, fact, now)
        beginning = _start_job(
            observed, checkpoints_job.data_job(checkpoint, observed.run, DELETE, platform), now
        )
        if not beginning:
            return Decision(status=status, requeue_after_s=SLOT_POLL_S)
        return Decision(status=status, actions=beginning)
    if is_true(job, JOB_COMPLETE):
        return Decision(
            status=checkpoint.status,
            # Deleting twice does no harm; a Job without its checkpoint would be left over.
            actions=(
                *_delete_job(observed, VERIFY),
                *_delete_job(observed, DELETE),
                _remove_finalizer(checkpoint, observed),
            ),
        )
    if is_true(job, JOB_FAILED):
        ending = observed.endings.get(DELETE)
        fact = false_condition("Ready", Reason.DELETION_FAILED, ending.message if ending else "")
        return _retry(checkpoint_status(checkpoint, fact, now), observed, DELETE, now)
    ways_out = tuple(_egress_policies(checkpoint, observed, job, platform))
    words = observed.troubles.get(DELETE) or "its objects are being deleted"
    status = checkpoint_status(checkpoint, false_condition("Ready", Reason.DELETING, words), now)
    # A policy of its run that is deleted meanwhile sends no event about the checkpoint.
    return Decision(status=status, actions=ways_out, requeue_after_s=RETRY_S)


def _egress_policies(
    checkpoint: Checkpoint, observed: ObservedCheckpoint, job: Manifest, platform: Platform
) -> Iterator[Apply]:
    """An egress policy for a Job without one of its run; the Job owns it."""
    storage = checkpoint.storage
    is_needed = platform.namespace is not None and observed.needs_egress_policy
    if is_needed and storage is not None and ref(job).name not in observed.policies:
        yield Apply(
            manifest=stamp_digest(network_policies.job_policy(job, storage)),
            manager=names.CHECKPOINT_FIELD_MANAGER,
        )


def _remove_finalizer(checkpoint: Checkpoint, observed: ObservedCheckpoint) -> SetFinalizers:
    remaining = (f for f in checkpoint.metadata.finalizers if f != names.CHECKPOINT_DATA)
    return SetFinalizers(observed=observed.manifest, finalizers=tuple(remaining))


def _retry(
    status: CheckpointStatus, observed: ObservedCheckpoint, what: str, now: ClockReading
) -> Decision[CheckpointStatus]:
    """Delete the failed Job after RETRY_S; the next pass starts a new one."""
    ended = parse_rfc3339(condition(observed.jobs[what], JOB_FAILED)["lastTransitionTime"])
    wait_s = RETRY_S - (now.wall_s - ended)
    if wait_s > 0:
        return Decision(status=status, requeue_after_s=min(wait_s, RETRY_S))
    return Decision(status=status, actions=_delete_job(observed, what))


def _delete_job(observed: ObservedCheckpoint, what: str) -> tuple[Delete, ...]:
    job = observed.jobs.get(what)
    return () if job is None or is_deleting(job) else (Delete(ref=ref(job), uid=uid(job)),)
