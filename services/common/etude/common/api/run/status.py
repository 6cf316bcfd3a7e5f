"""Observed state of a run."""

from typing import Annotated, Literal

from pydantic import Field

from etude.common.api.status_types import (
    Conditions,
    Count,
    Figure,
    Resolved,
    Short,
    StatusModel,
    Time,
)


class StepStatus(StatusModel):
    """Progress inside the active phase."""

    current: Count = 0
    """Finished optimiser steps of the phase."""
    target: Count = 0
    """Steps after which the phase ends."""
    text: Annotated[str, Field(max_length=64)] = ""
    """Both, as kubectl shows them: 12/60."""


class PhaseStatus(StatusModel):
    """Progress of one training phase."""

    name: Annotated[str, Field(max_length=63)]
    """Its name in spec.phases."""
    state: Literal["Waiting", "Active", "Done", "Skipped"] = "Waiting"
    """Skipped: the run ended before it began."""
    step: Count = 0
    """Finished optimiser steps of it."""
    target: Count = 0
    """Steps after which it ends at the latest."""
    gate: Literal["Pending", "Met", "NotMet"] | None = None
    """Whether what must hold at its end did; absent without a gate."""


class RewardStatus(StatusModel):
    """Reward of the newest steps."""

    mean: Figure
    """Mean over the rollouts of the last step."""
    ewma: Figure
    """Exponentially weighted mean over steps."""


class StalenessStatus(StatusModel):
    """Versions between sampling and training, over the rollouts of the last step."""

    p50: Figure
    """Median."""
    max: Count
    """Largest."""


class RolloutStatus(StatusModel):
    """An account of every rollout."""

    in_flight: Count = 0
    """Rollouts of the groups that are under way, siblings that are finished included."""
    completed: Count = 0
    """Finished, those that are masked included."""
    trained: Count = 0
    """Part of a finished step."""
    masked: Count = 0
    """Left out of training after a platform fault."""
    retried: Count = 0
    """Repeated after a platform fault."""
    dropped: Count = 0
    """Finished but never trained, with a reason in the journal."""


class RoleStatus(StatusModel):
    """The pods of one role."""

    name: Annotated[str, Field(max_length=63)]
    """trainer, inference or rewards."""
    desired: Count
    """Pods wanted now."""
    ready: Count
    """Pods of the current attempt that answer their readiness probe."""
    gpus: Count = 0
    """GPUs that the pods wanted now ask for."""
    attempt: Count = 0
    """Value of status.attempt when this role was last started anew."""
    startup_seconds: Count | None = None
    """Seconds from their creation until all of its pods were ready, the first time."""
    after: Time | None = None
    """When the newest pod of earlier attempts was made, where pods do not say so themselves."""


class Released(StatusModel):
    """That the active phase does without some roles, which hold no pods."""

    since: Time
    """When they were let go."""
    message: Annotated[str, Field(max_length=256)] = ""
    """Why, in figures."""


class EngineStatus(StatusModel):
    """Desired number of engines, where it follows the steps."""

    replicas: Count
    """Engines wanted."""
    version: Count = 0
    """Policy version at which that was decided, or the newest since that fewer of them served."""
    message: Annotated[str, Field(max_length=256)] = ""
    """Why, in figures."""


class EnvironmentStatus(StatusModel):
    """The environments of one entry of roles.environments."""

    name: Annotated[str, Field(max_length=63)]
    """Name in roles.environments."""
    pool: Annotated[str, Field(max_length=63)]
    """EnvPool that serves it."""
    ready: bool = False
    """Whether the pool is Available."""
    driver: Annotated[str, Field(max_length=63)] = ""
    """Driver that runs them."""
    isolation: Literal["Weak", "Moderate", "Strong", ""] = ""
    """Strength of the wall around each."""
    leased: Count = 0
    """Leases that are held, by all runs."""


class CheckpointSummary(StatusModel):
    """The newest checkpoint that is Ready."""

    name: Short
    """Its metadata.name."""
    step: Count
    """Optimiser steps in it, over all phases."""
    time: Time
    """When it was verified."""


class BestCheckpoint(CheckpointSummary):
    """The checkpoint that keepBest keeps first."""

    metric: Figure
    """Its figure, by which it is best."""


class Restarts(StatusModel):
    """Restarts after failures, and pods that were taken away."""

    total: Count = 0
    """Since the run was created."""
    counted: Count = 0
    """Since the last resetAfterSteps clean steps; compared with maxRestarts."""
    by_role: dict[str, int] = Field(default_factory=dict, max_length=8)
    """Since the run was created, by role."""
    infra: Count = 0
    """Pods that the platform took away: evicted, drained, preempted. None of them counts above."""
    disrupted: Annotated[tuple[Short, ...], Field(max_length=256)] = ()
    """UIDs of those that are still there, so that none is counted twice."""
    phase: Annotated[str, Field(max_length=63)] = ""
    """Active phase when clean steps were last counted from."""
    step: Count = 0
    """Step of that phase from which clean steps are counted."""


class Failure(StatusModel):
    """The newest failure of a pod or of the controller."""

    time: Time
    """When it was seen."""
    role: Annotated[str, Field(max_length=63)]
    """Role that failed."""
    pod: Short = ""
    """Pod that failed; empty when the controller reported it."""
    reason: Annotated[str, Field(max_length=64)]
    """Reason code."""
    exit_code: int | None = None
    """Exit code of the container."""
    message: Annotated[str, Field(max_length=1024)] = ""
    """Last words."""


class Intent(StatusModel):
    """Transition that the operator is carrying out; written before the first action."""

    type: Literal["Suspend", "Release", "Restart", "Salvage", "Fail", "Complete"]
    """The decision; Release follows Suspend once everything is saved, and Fail follows Salvage."""
    reason: Annotated[str, Field(max_length=64)]
    """Reason code, which becomes that of the condition."""
    message: Annotated[str, Field(max_length=1024)] = ""
    """A sentence for people."""
    role: Annotated[str, Field(max_length=63)] = ""
    """Restart: the role; every role when empty."""
    generation: Count = 0
    """Generation of the spec that it was decided for."""
    attempt: Count = 0
    """Attempt that it belongs to."""
    since: Time
    """When it was decided."""


class Hold(StatusModel):
    """Reason for which a run is suspended although its spec does not ask for it."""

    reason: Annotated[str, Field(max_length=64)]
    """Reason code, which becomes that of the condition."""
    message: Annotated[str, Field(max_length=1024)] = ""
    """A sentence for people."""
    since: Time
    """When it was decided."""


class RollbackRequest(StatusModel):
    """Checkpoint to which a run was rolled back once."""

    number: Count = 0
    """How many times it had been put back then, this one included."""
    step: Count | None = None
    """Optimiser steps in what it went on from; absent for the start weights."""
    branch: Count = 0
    """How often the run had been put back when that was written."""


class Resumption(StatusModel):
    """The newest decision on where a run goes on."""

    number: Count = 0
    """Counts the decisions that put the run back; 0 before the first."""
    mode: Annotated[str, Field(max_length=16)] = ""
    """checkpointing.resume as it was then; empty once it is to be decided anew."""
    asked: Short = ""
    """checkpointing.resumeFrom as it was then."""
    name: Short = ""
    """Checkpoint that the run was put back to; empty for its start weights."""
    step: Count | None = None
    """Optimiser steps in it; absent for the start weights."""
    branch: Count = 0
    """How often the run had been put back when it was written."""
    earlier: Annotated[tuple[RollbackRequest, ...], Field(max_length=64)] = ()
    """The decisions before this one that put the run back, oldest first; the last 64 of them."""


class Usage(StatusModel):
    """Resources that the run has used."""

    gpu_seconds: Annotated[float, Field(ge=0)] = 0
    """GPUs times seconds, up to accountedAt."""
    gpus: Count = 0
    """GPUs that its pods have held since then."""
    sandbox_seconds: Annotated[float, Field(ge=0)] = 0
    """Environments times seconds, up to accountedAt."""
    sandboxes: Count = 0
    """Environments that it has leased since then."""
    accounted_at: Time | None = None
    """When it was added up last; absent while nothing is held."""


class ReportPosition(StatusModel):
    """Position up to which the controller's checkpoints and events were taken over."""

    epoch: Count = 0
    """Incarnation of the controller."""
    sequence: Count = 0
    """Its last report that needs no replay."""


class ActiveTime(StatusModel):
    """Time for which the run has held pods."""

    seconds: Annotated[float, Field(ge=0)] = 0
    """Up to the last suspension or end."""
    since: Time | None = None
    """Start of the present stretch; absent while there are no pods."""


class RLRunStatus(StatusModel):
    """Observed state of a run."""

    observed_generation: Count = 0
    """Generation of the spec that this status is about."""
    phase: Annotated[str, Field(max_length=32)] = ""
    """One word, derived from the conditions; nothing is decided by it."""
    conditions: Conditions = ()
    """Facts, each with a reason."""
    active_phase: Annotated[str, Field(max_length=63)] = ""
    """Name of the training phase that the controller is in."""
    phases: Annotated[tuple[PhaseStatus, ...], Field(max_length=16)] = ()
    """Every training phase, in order."""
    step: StepStatus | None = None
    """Progress inside the active phase."""
    reward: RewardStatus | None = None
    """Reward of the newest steps; absent before reinforcement learning."""
    eval_success: Figure | None = None
    """Success on held-out tasks at the last evaluation."""
    policy_version: Count = 0
    """Newest published version."""
    lent_engines: Count = 0
    """Engines of PolicyRoutes that sample for it now, while their users do without them."""
    staleness: StalenessStatus | None = None
    """Age of what was trained on."""
    tokens_per_second: Figure | None = None
    """Tokens sampled or trained per second, by phase."""
    ettr: Figure | None = None
    """Seconds of steps that were kept, as a share of the time with pods."""
    rollouts: RolloutStatus | None = None
    """An account of every rollout."""
    roles: Annotated[tuple[RoleStatus, ...], Field(max_length=8)] = ()
    """Pods by role."""
    released: Released | None = None
    """That engines, rewards and own pools hold no pods now, by scheduling.idleRoles."""
    engines: EngineStatus | None = None
    """Engines wanted, where roles.inference.autoscaling decides it."""
    environments: Annotated[tuple[EnvironmentStatus, ...], Field(max_length=32)] = ()
    """Pools by environment."""
    last_checkpoint: CheckpointSummary | None = None
    """Where a resume starts, unless checkpointing.resume says otherwise."""
    best_checkpoint: BestCheckpoint | None = None
    """The best of those that are Ready, by checkpointing.keepBest; absent without it."""
    start_time: Time | None = None
    """When the run was accepted."""
    completion_time: Time | None = None
    """When it became Complete or Failed."""
    last_step_time: Time | None = None
    """When the newest step finished."""
    active: ActiveTime = Field(default_factory=ActiveTime)
    """Time for which the run has held pods."""
    attempt: Count = 0
    """Grows by one with every restart of a role."""
    restarts: Restarts = Field(default_factory=Restarts)
    """Restarts after failures."""
    last_failure: Failure | None = None
    """The newest failure."""
    intent: Intent | None = None
    """What the operator is carrying out."""
    hold: Hold | None = None
    """Why the operator keeps the run suspended. It ends when its cause does, or when spec.suspend
    was true and is false again."""
    resumption: Resumption | None = None
    """Where the run was put back to; absent while checkpointing.resume never asked for it."""
    usage: Usage = Field(default_factory=Usage)
    """Resources that the run has used."""
    reported: ReportPosition = Field(default_factory=ReportPosition)
    """Position up to which the controller's checkpoints and events were taken over."""
    resolved: Resolved | None = None
    """Defaults pinned at acceptance."""
