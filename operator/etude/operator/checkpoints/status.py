"""Status and phase of a checkpoint."""

from etude.common.api.checkpoint.status import CheckpointStatus, Saved
from etude.common.api.kinds import Checkpoint
from etude.operator.actions import Moment
from etude.operator.clock import rfc3339
from etude.operator.conditions import Fact, conditions
from etude.operator.reasons import Reason

PHASES = {
    Reason.CHECKPOINT_VERIFIED: "Ready",
    Reason.CORRUPT: "Corrupt",
    Reason.DELETING: "Deleting",
    Reason.DELETION_FAILED: "Deleting",
    Reason.WAITING_FOR_RUN: "Pending",
    Reason.RUN_NOT_FOUND: "Pending",
    Reason.WRITING: "Writing",
    Reason.RUN_OVER: "Failed",
}
"""Phase for kubectl, by reason; for every other reason Verifying, or Deleting if terminating."""


def status_of(checkpoint: Checkpoint, fact: Fact, now: Moment) -> CheckpointStatus:
    """The status with the Ready condition and the fields of the saved data."""
    otherwise = "Deleting" if checkpoint.metadata.deletion_timestamp else "Verifying"
    when = rfc3339(now.wall_s)
    held = checkpoint.saved
    copied = {name: getattr(held, name) for name in Saved.model_fields}
    return checkpoint.status.model_copy(
        update={
            **copied,
            "observed_generation": checkpoint.metadata.generation,
            "phase": PHASES.get(Reason(fact.reason), otherwise),
            "conditions": conditions(
                [fact],
                checkpoint.status.conditions,
                generation=checkpoint.metadata.generation,
                now=when,
            ),
            "verified_time": checkpoint.status.verified_time or (when if fact.holds else None),
        }
    )
