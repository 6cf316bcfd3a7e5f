"""Checkpoint registry: reported by a run's controller, registered as objects, retired by age."""

from collections.abc import Iterator
from typing import Literal

from etude.common.api.kinds import Checkpoint, RLRun
from etude.common.api.meta import API_VERSION, NameRef
from etude.operator import names
from etude.operator.actions import AckReport, Action, Apply, CompleteRequest, Delete, RecordEvent
from etude.operator.builders.run_spec import run_labels
from etude.operator.builders.workload import object_head
from etude.operator.manifests import Manifest, Ref
from etude.operator.remotes.report_store import PendingReport
from etude.operator.runs.checkpoints import lineage, retention
from etude.operator.runs.observe import ObservedRun
from etude.v1 import run_pb2

DeletionPolicy = Literal["Retain", "Delete"]


def handle_reports(run: RLRun, observed: ObservedRun) -> Iterator[Action]:
    """Register reported checkpoints and events in the order of the reports."""
    for happening in observed.report.pending:
        if happening.checkpoint is not None:
            yield from _registration(
                run, observed, happening.checkpoint, may_be_old=happening.may_be_old
            )
        if happening.event is not None:
            yield _record_event(happening, happening.event)
        yield AckReport(position=happening.position)


def retire_superseded(run: RLRun, observed: ObservedRun) -> Iterator[Action]:
    """Delete the checkpoints that newer ones have superseded."""
    for checkpoint in retention.superseded_checkpoints(
        observed.checkpoints, run.spec.checkpointing, observed.start_sources
    ):
        if not checkpoint.metadata.deletion_timestamp:
            key = Ref("Checkpoint", run.metadata.namespace, checkpoint.metadata.name)
            yield Delete(ref=key, uid=checkpoint.metadata.uid)


def _registration(
    run: RLRun, observed: ObservedRun, record: run_pb2.CheckpointRecord, *, may_be_old: bool
) -> Iterator[Action]:
    asked = [*observed.requests, *observed.checkpoints]
    request = next((c for c in asked if c.metadata.uid == record.request), None)
    if record.request and request is not None:
        if not request.saved_state.uri:
            yield _complete_request(run, observed, request, record)
        return
    name = names.checkpoint(
        run.metadata.name, step=record.step, manifest_digest=record.manifest_digest
    )
    if all(known.metadata.name != name for known in observed.checkpoints):
        was_let_go = may_be_old and _was_deleted(run, name, record)
        policy: DeletionPolicy = "Retain" if was_let_go else "Delete"
        manifest = _manifest(run, name, record, policy)
        parent = _parent(run, observed, record)
        if parent is not None:
            manifest["spec"]["parentRef"] = parent.to_json()
        yield Apply(manifest=manifest, manager=names.RUN_FIELD_MANAGER)


def _complete_request(
    run: RLRun, observed: ObservedRun, request: Checkpoint, record: run_pb2.CheckpointRecord
) -> CompleteRequest:
    """The requested Checkpoint, completed with the data that the controller wrote for it."""
    saved = {
        "uri": record.uri,
        "manifest_digest": record.manifest_digest,
        "step": record.step,
        "policy_version": record.policy_version,
        "keyframe": record.keyframe if record.HasField("keyframe") else None,
        "size_bytes": record.size_bytes,
        "branch": record.branch,
        "parent_ref": _parent(run, observed, record),
        "metrics": dict(record.metrics),
        "storage": run.spec.storage,
    }
    key = Ref("Checkpoint", run.metadata.namespace, request.metadata.name)
    return CompleteRequest(
        ref=key, uid=request.metadata.uid, status=request.status.model_copy(update=saved)
    )


def _parent(run: RLRun, observed: ObservedRun, record: run_pb2.CheckpointRecord) -> NameRef | None:
    """The Checkpoint that the run resumed from, under the name of its object if there is one."""
    digest = record.parent_digest
    if not digest:
        return None
    known = (
        c.metadata.name for c in observed.checkpoints if c.saved_state.manifest_digest == digest
    )
    name = names.checkpoint(run.metadata.name, step=record.parent_step, manifest_digest=digest)
    return NameRef(name=next(known, name))


def _was_deleted(run: RLRun, name: str, record: run_pb2.CheckpointRecord) -> bool:
    """The checkpoint was an object before, which was deleted without its data.

    A new controller reports every checkpoint in the store. Those older than the newest one ever
    verified were reported before, and so were those off the run's lineage.
    """
    if lineage.is_off_lineage_at(record.branch, record.step, run.status.resumption):
        return True
    last = run.status.last_checkpoint
    return last is not None and (record.step < last.step or name == last.name)


def _manifest(
    run: RLRun, name: str, record: run_pb2.CheckpointRecord, policy: DeletionPolicy
) -> Manifest:
    manifest = object_head(run, API_VERSION, "Checkpoint", name, run_labels(run))
    if policy == "Delete":
        manifest["metadata"]["finalizers"] = [names.CHECKPOINT_DATA]
    manifest["spec"] = {
        "runRef": {"name": run.metadata.name, "uid": run.metadata.uid},
        "reason": record.reason,
        "source": {"uri": record.uri, "manifestDigest": record.manifest_digest},
        "storage": run.spec.storage.to_json(),
        "step": record.step,
        "policyVersion": record.policy_version,
        "sizeBytes": record.size_bytes,
        "branch": record.branch,
        "deletionPolicy": policy,
        "verify": run.spec.checkpointing.verify,
    }
    if record.HasField("keyframe"):
        manifest["spec"]["keyframe"] = record.keyframe
    if record.metrics:
        manifest["spec"]["metrics"] = dict(record.metrics)
    return manifest


def _record_event(happening: PendingReport, event: run_pb2.RunEvent) -> RecordEvent:
    epoch, sequence = happening.position
    return RecordEvent(
        name=f"report-{epoch}-{sequence}",
        reason=event.reason,
        message=event.message,
        is_warning=event.warning,
    )
