"""Status and phase of a checkpoint."""

from etude.common.api.checkpoint.status import CheckpointStatus, SavedCheckpoint
from etude.common.api.kinds import Checkpoint
from etude.operator.actions import ClockReading
from etude.operator.clock import rfc3339
from etude.operator.conditions import ConditionFact, is_condition_true, merge_conditions
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


def checkpoint_status(
    checkpoint: Checkpoint, fact: ConditionFact, now: ClockReading
) -> CheckpointStatus:
    """The status with the Ready condition and the fields of the saved data."""
    otherwise = "Deleting" if checkpoint.metadata.deletion_timestamp else "Verifying"
    when = rfc3339(now.wall_s)
    held = checkpoint.saved_state
    copied = {name: getattr(held, name) for name in SavedCheckpoint.model_fields}
    return checkpoint.status.model_copy(
        update={
            **copied,
            "observed_generation": checkpoint.metadata.generation,
            "phase": PHASES.get(Reason(fact.reason), otherwise),
            "conditions": merge_conditions(
                [fact],
                checkpoint.status.conditions,
                generation=checkpoint.metadata.generation,
                now=when,
            ),
            "verified_time": checkpoint.status.verified_time or (when if fact.holds else None),
        }
    )


def is_ready(checkpoint: Checkpoint) -> bool:
    """A run can resume from the checkpoint."""
    return is_condition_true(checkpoint.status.conditions, "Ready")


def ready_condition(checkpoint: Checkpoint) -> ConditionFact | None:
    """The Ready condition of a checkpoint; None before its first pass."""
    found = (c for c in checkpoint.status.conditions if c.type == "Ready")
    return next(
        (ConditionFact(c.type, c.status == "True", c.reason, c.message) for c in found), None
    )


def is_corrupt(checkpoint: Checkpoint) -> bool:
    """The checkpoint's data does not match its manifest."""
    fact = ready_condition(checkpoint)
    return fact is not None and fact.reason == Reason.CORRUPT


def is_verification_over(checkpoint: Checkpoint) -> bool:
    """The checkpoint's data was verified, with either result."""
    return is_ready(checkpoint) or is_corrupt(checkpoint)
