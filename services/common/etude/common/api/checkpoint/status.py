"""Observed state of a checkpoint."""

from typing import Annotated

from pydantic import Field

from etude.common.api.meta import NameRef
from etude.common.api.status_types import Conditions, Count, StatusModel, Time
from etude.common.api.storage import Storage


class SavedCheckpoint(StatusModel):
    """Content of a checkpoint."""

    uri: Annotated[str, Field(max_length=1024)] = ""
    """Prefix of its objects; empty until they are written."""
    manifest_digest: Annotated[str, Field(max_length=64)] = ""
    """SHA-256 of its manifest."""
    step: Count = 0
    """Optimiser steps in it, over all phases."""
    policy_version: Count = 0
    """Newest version published from it."""
    keyframe: Count | None = None
    """Version stored whole at which engines begin on their way to policyVersion."""
    size_bytes: Count = 0
    """Bytes of all its objects."""
    branch: Count = 0
    """Counts how often the run had been put back before it was written."""
    parent_ref: NameRef | None = None
    """The Checkpoint that the run went on from before it wrote this one."""
    metrics: dict[str, Annotated[str, Field(max_length=64)]] = Field(
        default_factory=dict, max_length=32
    )
    """Figures of the run at this step, as text."""


class CheckpointStatus(SavedCheckpoint):
    """Observed state of a checkpoint."""

    observed_generation: Count = 0
    """Generation of the spec that this status is about."""
    phase: Annotated[str, Field(max_length=32)] = ""
    """One word, derived from the conditions; nothing is decided by it."""
    conditions: Conditions = ()
    """Facts, each with a reason."""
    storage: Storage | None = None
    """How to reach what a Manual checkpoint holds; of the run that wrote it."""
    verified_time: Time | None = None
    """When its objects were found complete."""
