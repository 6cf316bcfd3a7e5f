"""Checkpoint: one complete, verified state of a run in the object store."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from etude.common.api.meta import Model, Name, NameRef, Rule, Uri
from etude.common.api.run.checkpointing import Depth
from etude.common.api.storage import Storage

DIGEST = r"^[0-9a-f]{64}$"


class RunRef(Model):
    """The run that a checkpoint came from."""

    name: Name
    """Its metadata.name."""
    uid: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    """Its metadata.uid, so that a new run of the same name is not mistaken for it; a request names
    the run that has the name when it is made."""


class CheckpointSource(Model):
    """Location of the state."""

    uri: Uri
    """Prefix of its objects."""
    manifest_digest: Annotated[str, Field(pattern=DIGEST, max_length=64)]
    """SHA-256 of its manifest: the truth about its content."""


class CheckpointSpec(Model):
    """Content and retention of a checkpoint."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="self.deletionPolicy != 'Delete' || has(self.runRef)",
            holds=lambda s: s.deletion_policy != "Delete" or s.run_ref is not None,
            message="deletionPolicy Delete needs a runRef: imported data is never deleted by us",
            fix="set deletionPolicy: Retain",
            field_path=".deletionPolicy",
        ),
        Rule(
            cel="has(self.runRef) || self.reason == 'Imported'",
            holds=lambda s: s.run_ref is not None or s.reason == "Imported",
            message="only an import, reason Imported, has no runRef",
            fix="name the run: runRef: {name: …}",
            field_path=".runRef",
        ),
        Rule(
            cel="self.reason == 'Manual' ? !has(self.source) && !has(self.storage)"
            " : has(self.source) && has(self.storage)",
            holds=lambda s: (
                (s.source is None and s.storage is None)
                if s.reason == "Manual"
                else (s.source is not None and s.storage is not None)
            ),
            message="source and storage are needed, but for reason Manual: a run that is asked for"
            " a checkpoint says itself where it lies",
            fix="give source and storage, or remove both for reason: Manual",
            field_path=".source",
        ),
        Rule(
            cel="self.reason != 'Manual' || (self.step == 0 && self.policyVersion == 0"
            " && self.sizeBytes == 0 && !has(self.keyframe)"
            " && self.branch == 0 && !has(self.parentRef)"
            " && (!has(self.metrics) || size(self.metrics) == 0))",
            holds=lambda s: (
                s.reason != "Manual"
                or (
                    not (s.step or s.policy_version or s.size_bytes or s.metrics or s.branch)
                    and s.keyframe is None
                    and s.parent_ref is None
                )
            ),
            message="a checkpoint of reason Manual has no step, policyVersion, sizeBytes,"
            " keyframe, branch, parentRef and metrics here: they stand in its status, once it is"
            " written",
            fix="remove step, policyVersion, sizeBytes, keyframe, branch, parentRef and metrics",
            field_path=".step",
        ),
    )

    run_ref: RunRef | None = None
    """The run that wrote it; absent for an import."""
    reason: Literal[
        "Scheduled", "Manual", "Suspend", "Failure", "Window", "PhaseEnd", "Final", "Imported"
    ]
    """Why it was written: Window is the end of a window of a phase of type Feedback. An object that
    is made with Manual and a runRef asks that run to write one after its next step."""
    source: CheckpointSource | None = None
    """Where the state lies; absent for Manual, whose status says it."""
    storage: Storage | None = None
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
    branch: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    """Counts how often the run had been put back by checkpointing.resume before it was written."""
    parent_ref: NameRef | None = None
    """The Checkpoint that the run went on from before it wrote this one, which may be gone; absent
    for the first, and never changes."""
    pinned: bool = False
    """Pinned checkpoints are never collected."""
    verify: Depth = "Checksums"
    """What is checked before it is Ready."""
    deletion_policy: Literal["Retain", "Delete"] = "Delete"
    """Whether the data goes when the object goes; the object goes with its run in both cases."""
    metrics: dict[str, Annotated[str, Field(max_length=64)]] = Field(
        default_factory=dict, max_length=32
    )
    """Figures of the run at this step, as text."""
