"""Checkpoint: one complete, verified state of a run in the object store."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from etude.common.api.meta import Model, Rule, Uri
from etude.common.api.run import Storage

DIGEST = r"^[0-9a-f]{64}$"


class RunRef(Model):
    """The run that a checkpoint came from."""

    name: Annotated[str, Field(min_length=1, max_length=40)]
    """Its metadata.name."""
    uid: Annotated[str, Field(min_length=1, max_length=64)]
    """Its metadata.uid, so that a new run of the same name is not mistaken for it."""


class CheckpointSource(Model):
    """Where the state lies."""

    uri: Uri
    """Prefix of its objects."""
    manifest_digest: Annotated[str, Field(pattern=DIGEST, max_length=64)]
    """SHA-256 of its manifest: the truth about its content."""


class CheckpointSpec(Model):
    """What a checkpoint is and whether it stays."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="self.deletionPolicy != 'Delete' || has(self.runRef)",
            holds=lambda s: s.deletion_policy != "Delete" or s.run_ref is not None,
            message="deletionPolicy Delete needs a runRef: imported data is never deleted by us",
            fix="set deletionPolicy: Retain",
            field_path=".deletionPolicy",
        ),
    )

    run_ref: RunRef | None = None
    """The run that wrote it; absent for an import."""
    reason: Literal["Scheduled", "Suspend", "PhaseEnd", "Final", "Imported"]
    """Why it was written."""
    source: CheckpointSource
    """Where the state lies."""
    storage: Storage
    """How to reach it; copied from the run, which may be gone when the data is deleted."""
    step: Annotated[int, Field(ge=0)] = 0
    """Optimiser steps in it, over all phases."""
    policy_version: Annotated[int, Field(ge=0)] = 0
    """Newest version published from it."""
    keyframe: Annotated[int, Field(ge=0)] | None = None
    """Version stored whole at which engines begin on their way to policyVersion; absent where the
    chain of versions was broken when the checkpoint was registered."""
    size_bytes: Annotated[int, Field(ge=0)] = 0
    """Bytes of all its objects."""
    pinned: bool = False
    """Pinned checkpoints are never collected."""
    deletion_policy: Literal["Retain", "Delete"] = "Delete"
    """Whether the data goes when the object goes; the object goes with its run in both cases."""
    metrics: dict[str, Annotated[str, Field(max_length=64)]] = Field(
        default_factory=dict, max_length=32
    )
    """Figures of the run at this step, as text."""
