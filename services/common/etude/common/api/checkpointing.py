"""When complete states of a run are saved, how they are checked, and which are kept."""

from typing import Annotated, Literal

from pydantic import Field

from etude.common.api.meta import Model

EVERY_STEPS = 10
"""Steps between checkpoints of a run that gives no cadence."""

Depth = Literal["Manifest", "Checksums"]
"""How far a checkpoint is checked: sizes of its objects, or every byte of them."""


class KeepBest(Model):
    """Checkpoints that stay because the policy was best in them."""

    metric: Literal["Reward", "EvalSuccess"]
    """Figure of the checkpoint: smoothed reward of the steps before it, or success of the newest
    evaluation before it."""
    mode: Literal["Max", "Min"] = "Max"
    """Whether the largest or the smallest figure is best; of equal ones the earlier stays."""
    count: Annotated[int, Field(ge=1, le=100)] = 1
    """How many stay, beside the newest ones."""


class Checkpointing(Model):
    """When complete states are saved and which are kept."""

    every_steps: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Optimiser steps between checkpoints, within each phase; 10 if no cadence is given."""
    every_seconds: Annotated[int, Field(ge=10, le=604_800)] | None = None
    """Seconds between checkpoints: the first step that ends later saves. With everySteps too,
    whatever comes first."""
    keep_last: Annotated[int, Field(ge=1, le=1_000)] = 3
    """Newest verified checkpoints that are kept."""
    keep_best: KeepBest | None = None
    """Verified checkpoints that are kept beside them for a figure."""
    verify: Depth = "Checksums"
    """What is checked before a checkpoint is Ready: Manifest looks for every object with its size,
    Checksums reads them all back. A run that resumes always reads all."""
    on_suspend: Literal["Always", "Skip"] = "Always"
    """Whether suspending saves first."""
    on_failure: Literal["BestEffort", "Skip"] = "BestEffort"
    """Whether a run that fails while its controller still works saves first."""
    timeout_seconds: Annotated[int, Field(ge=1, le=86_400)] = 600
    """Longest time one checkpoint may take."""

    @property
    def steps_between(self) -> int | None:
        """Steps between checkpoints; None where time alone decides."""
        if self.every_steps is None and self.every_seconds is None:
            return EVERY_STEPS
        return self.every_steps
