"""Life cycle of a run: failure policy, deadlines, budget, deletion."""

from enum import StrEnum
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from etude.common.api.meta import Fraction, Model, Name, Rule

OPERATOR = "etude.dev/operator"
"""The manager of a run that names no other."""

MANAGER = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"
CONDITION = r"^[A-Za-z0-9]([-A-Za-z0-9_./]*[A-Za-z0-9])?$"

Seconds = Annotated[int, Field(ge=0, le=31_536_000)]


class Cause(StrEnum):
    """Kind of failure that a rule matches."""

    EXIT = "Exit"
    POD_CONDITION = "PodCondition"
    STALLED = "Stalled"


class FailureAction(StrEnum):
    """Consequence of a failure."""

    RESTART_ROLE = "RestartRole"
    RESTART_RUN = "RestartRun"
    FAIL_RUN = "FailRun"
    IGNORE = "Ignore"
    CHECKPOINT_AND_SUSPEND = "CheckpointAndSuspend"


class ExitCodes(Model):
    """Exit codes of a container."""

    op: Literal["In", "NotIn"] = "In"
    """Whether the code must or must not be one of values."""
    values: Annotated[tuple[Annotated[int, Field(ge=0, le=255)], ...], Field(max_length=64)]
    """Codes; one above 128 is a signal plus 128, so 137 is a kill."""


class FailureRule(Model):
    """One kind of failure, and what follows from it."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="self.cause == 'Exit' || !has(self.exitCodes)",
            holds=lambda s: s.cause is Cause.EXIT or s.exit_codes is None,
            message="only a rule of cause Exit has exitCodes",
            fix="set cause: Exit, or remove exitCodes",
            field_path=".exitCodes",
        ),
        Rule(
            cel="(self.cause == 'PodCondition')"
            " == (has(self.podConditions) && size(self.podConditions) > 0)",
            holds=lambda s: (s.cause is Cause.POD_CONDITION) == bool(s.pod_conditions),
            message="a rule of cause PodCondition needs podConditions, and no other has them",
            fix="name the conditions, for example podConditions: [DisruptionTarget]",
            field_path=".podConditions",
        ),
        Rule(
            cel="self.cause != 'Stalled' || !has(self.role)",
            holds=lambda s: s.cause is not Cause.STALLED or s.role is None,
            message="a rule of cause Stalled has no role: the run as a whole makes no progress",
            fix="remove role",
            field_path=".role",
        ),
    )

    name: Name
    """Name that conditions and Events say."""
    role: Literal["trainer", "inference", "rewards"] | None = None
    """Role whose pods it is about; all of them unless set."""
    cause: Cause
    """A container that ended by itself, a pod whose condition became True, or a run that finished
    no step within its deadline."""
    exit_codes: ExitCodes | None = None
    """Exit: the codes that match; all of them unless set."""
    pod_conditions: (
        Annotated[
            tuple[Annotated[str, Field(max_length=316, pattern=CONDITION)], ...],
            Field(max_length=8),
        ]
        | None
    ) = None
    """PodCondition: types of which one is True."""
    action: FailureAction
    """RestartRole starts the role anew (the trainer where the run stalled) and RestartRun every
    role, both counted by maxRestarts; Ignore leaves it to the kubelet."""


class FailurePolicy(Model):
    """Consequences of failures, and the number of restarts of a run."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="!has(self.rules) || self.rules.all(r, self.rules.exists_one(q, q.name == r.name))",
            holds=lambda s: len({r.name for r in s.listed}) == len(s.listed),
            message="every name of rules must be unique",
            fix="rename one of the rules",
            field_path=".rules",
        ),
    )

    max_restarts: Annotated[int, Field(ge=0, le=1_000)] = 3
    """Restarts after failures, before the run fails."""
    reset_after_steps: Annotated[int, Field(ge=1, le=1_000_000)] = 50
    """Clean steps after which the count starts again."""
    listed: Annotated[tuple[FailureRule, ...], Field(alias="rules", max_length=20)] = ()
    """The first rule that matches decides. What none matches: exit codes 64 and 78 fail the run, a
    trainer that ends or stalls restarts alone, one that cannot reach its store (75) is the
    kubelet's to restart once the run has begun, engines and rewards are the kubelet's to restart
    five times, and a disruption is no failure."""


class Deadlines(Model):
    """Limits on time without result."""

    pre_running_seconds: Annotated[int, Field(ge=1, le=31_536_000)] | None = None
    """From acceptance to the first report of the controller."""
    active_seconds: Annotated[int, Field(ge=1, le=31_536_000)] | None = None
    """Total time with pods."""
    step_progress_seconds: Annotated[int, Field(ge=1, le=31_536_000)] | None = None
    """Longest time without a finished step or rollout, beside checkpoints and evaluations; derived
    from measured steps unless set. A controller has an hour at least for its first step, also where
    it resumes: it loads, and waits for engines. While it waits for its store, nothing counts."""


class Budget(Model):
    """Resources that a run may use in all."""

    gpu_hours: Fraction | None = None
    """GPUs times hours, from pods with a node to pods that are gone. Once they are spent the run
    saves a checkpoint and is suspended, until this is raised. Devices of resourceClaims are not
    counted, so a role that has these alone is refused beside it, before the run begins."""
    sandbox_hours: Fraction | None = None
    """Environments times hours for which the run leases them; what follows is the same."""


class DeletionRule(Model):
    """Deletion of objects once a run is over."""

    after: Literal["Complete", "Failed"]
    """The end that it is about."""
    policy: Literal["DeleteRoles", "DeletePools", "DeleteSelf"]
    """The workloads of the roles, whose pods are gone already; the run's own pools; or the run,
    with everything that it owns and the data of its checkpoints, but for retained ones."""
    ttl_seconds: Seconds = 0
    """How long after the end."""
