"""Checkpointing of a run: cadence, verification, retention, resumption."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from etude.common.api.meta import Model, NameRef, Rule

EVERY_STEPS = 10
"""Steps between checkpoints of a run that gives no cadence."""

Depth = Literal["Manifest", "Checksums", "Load"]
"""How far a checkpoint is checked: sizes of its objects, every byte of them, or whether a learner
can be made of them."""


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
    """Cadence, verification and retention of complete states."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="(self.resume == 'Named') == has(self.resumeFrom)",
            holds=lambda s: (s.resume == "Named") == (s.resume_from is not None),
            message="resume Named needs resumeFrom, and nothing else has it",
            fix="name a Checkpoint of the run: resumeFrom: {name: …}, or remove resumeFrom",
            field_path=".resumeFrom",
        ),
        Rule(
            cel="self.resume != 'Best' || has(self.keepBest)",
            holds=lambda s: s.resume != "Best" or s.keep_best is not None,
            message="resume Best needs keepBest, which says what is best and keeps it",
            fix="set keepBest: {metric: Reward}, or resume: Latest",
            field_path=".resume",
        ),
    )

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
    Checksums reads them all back, Load makes a learner of them too, on the CPU of a Job with the
    trainer's image and memory. A run that resumes always reads all."""
    resume: Literal["Latest", "Best", "Named", "None"] = "Latest"
    """Where the run goes on when it gets pods again after you suspended it, or after this field was
    changed: its newest checkpoint, its best one by keepBest, the one of resumeFrom, or its start
    weights. What came after that place stays in the store as long as its Checkpoints do. Whatever
    else ends a run's pods, it goes on from its newest checkpoint."""
    resume_from: NameRef | None = None
    """Named: a Checkpoint of this run. It is not superseded while it is named."""
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
