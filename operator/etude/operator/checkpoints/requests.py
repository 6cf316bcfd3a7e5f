"""On-demand checkpoints: Checkpoint objects that a user created and a run has not written yet."""

from etude.common.api.checkpoint.status import CheckpointStatus
from etude.common.api.kinds import Checkpoint, RLRun
from etude.operator import names
from etude.operator.actions import Adopt, ClockReading, Decision
from etude.operator.builders.run_spec import run_labels
from etude.operator.builders.workload import owner_reference
from etude.operator.checkpoints.status import checkpoint_status, ready_condition
from etude.operator.conditions import ConditionFact, false_condition, is_condition_true
from etude.operator.manifests import Manifest, controller, controller_uid
from etude.operator.reasons import Reason

POLL_S = 5.0
"""Time between two looks at the request's run, whose events do not reach the request."""


def decide(
    request: Checkpoint, manifest: Manifest, run: RLRun | None, now: ClockReading
) -> Decision[CheckpointStatus]:
    """One pass over a request: adopt it for its run, then report what it waits for.

    The run's own pass sends the command, and records the result.

    Args:
        request: without data so far.
        manifest: as it was read.
        run: the run that it names, if there is one.
        now: both clocks.
    """
    known = ready_condition(request)
    if known is not None and known.reason == Reason.RUN_OVER:
        # Final: a later run of the name has another state than was requested.
        return Decision(status=checkpoint_status(request, known, now))
    fact = _never_written(request, run) if run is not None else _run_missing(request)
    if fact is None and run is not None:
        is_ours = controller_uid(manifest) == run.metadata.uid
        if not is_ours and _adopter(manifest) != run.metadata.uid:
            return Decision(status=request.status, actions=(_adoption(request, manifest, run),))
        fact = _waiting_for_run(run) if is_ours else _adoption_undone(manifest, run)
    assert fact is not None  # noqa: S101 - a run that is there is awaited or wrong
    return Decision(status=checkpoint_status(request, fact, now), requeue_after_s=POLL_S)


def _run_missing(request: Checkpoint) -> ConditionFact:
    name = request.spec.run_ref.name if request.spec.run_ref is not None else ""
    message = f"spec.runRef.name: no RLRun {name} in this namespace: create it or name another"
    return false_condition("Ready", Reason.RUN_NOT_FOUND, message)


def _never_written(request: Checkpoint, run: RLRun) -> ConditionFact | None:
    """The condition of a request that this run will never write; None if it may."""
    ref = request.spec.run_ref
    if ref is not None and ref.uid not in {None, run.metadata.uid}:
        message = f"spec.runRef.uid: run {ref.name} was replaced (uid changed); make a new request"
        return false_condition("Ready", Reason.RUN_OVER, message)
    over = [k for k in ("Complete", "Failed") if is_condition_true(run.status.conditions, k)]
    if over:
        last = run.status.last_checkpoint
        where = f"; its last checkpoint is {last.name}" if last is not None else ""
        message = f"run {run.metadata.name} ended before this checkpoint was written{where}"
        return false_condition("Ready", Reason.RUN_OVER, message)
    return None


def _waiting_for_run(run: RLRun) -> ConditionFact:
    if is_condition_true(run.status.conditions, "Ready") and run.status.intent is None:
        return false_condition("Ready", Reason.WRITING, "the run writes it after its next step")
    message = f"run {run.metadata.name} is not running; the checkpoint is written once it is"
    return false_condition("Ready", Reason.WAITING_FOR_RUN, message)


def _adoption_undone(manifest: Manifest, run: RLRun) -> ConditionFact:
    """The condition of a request whose adoption was undone; adopting it again might never end."""
    other = controller(manifest)
    by = f"{other.get('kind')} {other.get('name')} controls it" if other else "nothing controls it"
    message = f"metadata.ownerReferences: {by} instead of run {run.metadata.name}, which writes it"
    return false_condition(
        "Ready", Reason.WAITING_FOR_RUN, f"{message} once it is the controller again"
    )


def _adopter(manifest: Manifest) -> str:
    annotations = manifest["metadata"].get("annotations") or {}
    return str(annotations.get(names.ADOPTED_BY, ""))


def _adoption(request: Checkpoint, manifest: Manifest, run: RLRun) -> Adopt:
    """Make the run its controller, so that it and its data are deleted with the run."""
    # Only the run may control it; other owners may stay.
    written = manifest["metadata"].get("ownerReferences") or ()
    owners = [owner_reference(run), *(owner for owner in written if not owner.get("controller"))]
    finalizers = list(manifest["metadata"].get("finalizers") or ())
    if request.spec.deletion_policy == "Delete" and names.CHECKPOINT_DATA not in finalizers:
        finalizers.append(names.CHECKPOINT_DATA)
    metadata = {
        "ownerReferences": owners,
        "labels": run_labels(run),
        "annotations": {names.ADOPTED_BY: run.metadata.uid},
        "finalizers": finalizers,
    }
    return Adopt(observed=manifest, metadata=metadata)
