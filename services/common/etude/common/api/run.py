"""RLRun: one post-training run from a model folder to a better policy."""

from enum import StrEnum
from typing import Annotated, ClassVar, Literal

from pydantic import Field, JsonValue

from etude.common.api.meta import Fraction, Model, Name, NameRef, Rule, Uri
from etude.common.api.pool import EnvPoolSpec


class PhaseType(StrEnum):
    """What a phase does."""

    CONTINUED_PRETRAINING = "ContinuedPretraining"
    SUPERVISED_FINE_TUNING = "SupervisedFineTuning"
    REINFORCEMENT_LEARNING = "ReinforcementLearning"


class AsyncMode(StrEnum):
    """How far sampling may run ahead of training."""

    SYNC = "Sync"
    ONE_STEP_OFF = "OneStepOff"
    FULLY_ASYNC = "FullyAsync"


class ModelSource(Model):
    """Where the starting weights come from."""

    uri: Uri
    """A Hugging Face model folder; with a config and tokenizer but no weights, they are drawn from seed."""
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    """Seed of freshly drawn weights."""


class Storage(Model):
    """Where everything durable of a run lives."""

    uri: Uri
    """Prefix of the run: s3://bucket/prefix, or file:///folder mounted by every role."""
    endpoint: Annotated[str, Field(max_length=512, pattern=r"^https?://")] | None = None
    """S3 endpoint, for stores other than AWS."""
    region: Annotated[str, Field(max_length=64)] | None = None
    """S3 region."""
    secret_ref: NameRef | None = None
    """Secret with AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, mounted into the roles."""


class Dataset(Model):
    """Transcripts to learn from."""

    name: Name
    """Shown in metrics."""
    uri: Uri
    """A JSON-lines file: {"messages": […]} per line for chats, {"text": …} for plain text."""
    context_weight: Fraction = "0"
    """Loss weight of tokens that the assistant did not write; its own have 1."""


class TaskSet(Model):
    """Tasks to work on."""

    name: Name
    """Shown in metrics."""
    uri: Uri
    """A folder of task folders in Harbor layout."""
    environment: Name
    """Entry of roles.environments in which these tasks run."""


class Optimizer(Model):
    """AdamW and its learning-rate schedule."""

    learning_rate: Fraction
    """Peak learning rate."""
    schedule: Literal["Constant", "Linear", "Cosine", "WarmupStableDecay"] = "Constant"
    """Shape after warm-up."""
    warmup_steps: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """Steps of linear warm-up."""
    decay_start: Fraction = "0.6"
    """WarmupStableDecay: share of the phase at which the decay starts."""
    final_fraction: Fraction = "0"
    """Share of the peak that is left at the end."""
    weight_decay: Fraction = "0"
    """Decoupled decay, not applied to norms and biases."""
    gradient_clip: Fraction = "1"
    """Largest global gradient norm."""
    beta1: Fraction = "0.9"
    """Decay of the first moment."""
    beta2: Fraction = "0.95"
    """Decay of the second moment."""


class Algorithm(Model):
    """How rewards become gradients."""

    name: Literal["DrGRPO", "GRPO", "RLOO"] = "DrGRPO"
    """See the algorithms reference."""
    group_size: Annotated[int, Field(ge=2, le=1_024)] = 8
    """Rollouts per prompt."""
    prompts_per_step: Annotated[int, Field(ge=1, le=4_096)] = 16
    """Groups per optimiser step."""
    parameters: dict[str, JsonValue] = Field(default_factory=dict, max_length=64)
    """Checked against the algorithm's own model; an unknown key is refused."""


class AsyncLimits(Model):
    """How far sampling may run ahead of training."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="self.mode == 'Sync' ? self.maxStalenessVersions == 0 : self.maxStalenessVersions >= 1",
            holds=lambda s: (s.max_staleness_versions == 0) == (s.mode == AsyncMode.SYNC),
            message="mode Sync needs maxStalenessVersions 0, every other mode at least 1",
            field_path=".maxStalenessVersions",
        ),
        Rule(
            cel="self.mode != 'OneStepOff' || self.maxStalenessVersions == 1",
            holds=lambda s: s.mode != AsyncMode.ONE_STEP_OFF or s.max_staleness_versions == 1,
            message="mode OneStepOff needs maxStalenessVersions 1; use FullyAsync for more",
            field_path=".maxStalenessVersions",
        ),
    )

    mode: AsyncMode = AsyncMode.SYNC
    """Sync trains only on the newest version."""
    max_staleness_versions: Annotated[int, Field(ge=0, le=64)] = 0
    """No trained token is older than this many versions."""


class RolloutPolicy(Model):
    """Limits of one rollout, and what happens to failed ones."""

    toolset: Literal["Standard", "Compact"] = "Standard"
    """System prompt, tools and how their results read; Compact suits very small policies."""
    max_concurrent: Annotated[int, Field(ge=1, le=65_536)] = 64
    """Rollouts in flight."""
    max_turns: Annotated[int, Field(ge=1, le=1_024)] = 64
    """Turns of one rollout."""
    max_turn_tokens: Annotated[int, Field(ge=1, le=131_072)] = 4_096
    """Tokens sampled in one turn."""
    max_tokens: Annotated[int, Field(ge=16, le=1_048_576)] = 32_768
    """Tokens of a whole transcript, tool output included."""
    timeout_seconds: Annotated[int, Field(ge=1, le=86_400)] = 1_800
    """Wall time of one rollout."""
    retries: Annotated[int, Field(ge=0, le=3)] = 1
    """Repeats after a platform fault, before the rollout is masked."""
    max_infra_failure_percent: Annotated[int, Field(ge=0, le=100)] = 30
    """Share of masked rollouts in a step above which the run stops."""


class Phase(Model):
    """One training stage."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="self.type == 'ReinforcementLearning' ? has(self.tasks) && has(self.algorithm) : true",
            holds=lambda s: not s.is_rl or (s.tasks is not None and s.algorithm is not None),
            message="a ReinforcementLearning phase needs tasks and algorithm",
        ),
        Rule(
            cel="self.type == 'ReinforcementLearning' ? !has(self.data) && !has(self.batchSize) : true",
            holds=lambda s: not s.is_rl or (s.data is None and s.batch_size is None),
            message="a ReinforcementLearning phase has no data and no batchSize: use tasks and algorithm.promptsPerStep",
        ),
        Rule(
            cel="self.type == 'ReinforcementLearning' ? true : has(self.data) && !has(self.tasks) && !has(self.algorithm) && !has(self.asyncLimits) && !has(self.rollout)",
            holds=lambda s: (
                s.is_rl
                or (
                    s.data is not None
                    and s.tasks is None
                    and s.algorithm is None
                    and s.async_limits is None
                    and s.rollout is None
                )
            ),
            message="a supervised phase needs data and has no tasks, algorithm, asyncLimits or rollout",
        ),
    )

    name: Name
    """Unique within the run."""
    type: PhaseType
    """What this phase does."""
    max_steps: Annotated[int, Field(ge=1, le=10_000_000)]
    """Optimiser steps after which the phase ends."""
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    """Fixes the order of data and tasks, also after a restart."""
    optimizer: Optimizer
    """AdamW and its schedule."""
    batch_size: Annotated[int, Field(ge=1, le=65_536)] | None = None
    """Supervised phases: sequences per step; 12 unless set."""
    data: Annotated[tuple[Dataset, ...], Field(min_length=1, max_length=32)] | None = None
    """Supervised phases: transcripts."""
    tasks: Annotated[tuple[TaskSet, ...], Field(min_length=1, max_length=64)] | None = None
    """Reinforcement learning: tasks, each used at most once per run."""
    algorithm: Algorithm | None = None
    """Reinforcement learning: how rewards become gradients."""
    async_limits: AsyncLimits | None = None
    """Reinforcement learning: Sync unless set."""
    rollout: RolloutPolicy | None = None
    """Reinforcement learning: limits of one rollout."""

    @property
    def is_rl(self) -> bool:
        """Whether this phase samples."""
        return self.type == PhaseType.REINFORCEMENT_LEARNING


class EnvVar(Model):
    """One environment variable."""

    name: Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
    """Its name."""
    value: Annotated[str, Field(max_length=4_096)] = ""
    """Its value; secrets belong into a Secret."""


class RoleSpec(Model):
    """Size and placement of one role's pods."""

    image: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    """Container image; the chart's default unless set."""
    gpus_per_replica: Annotated[int, Field(ge=0, le=64)] = 0
    """Whole GPUs per pod."""
    cpu: Annotated[str, Field(max_length=32, pattern=r"^[0-9]+(\.[0-9]+)?m?$")] | None = None
    """CPU request per pod, a Kubernetes quantity."""
    memory: Annotated[str, Field(max_length=32, pattern=r"^[0-9]+(Ki|Mi|Gi|Ti)?$")] | None = None
    """Memory request and limit per pod, a Kubernetes quantity."""
    env: Annotated[tuple[EnvVar, ...], Field(max_length=128)] = ()
    """Extra environment variables."""
    node_selector: dict[str, str] = Field(default_factory=dict, max_length=64)
    """Labels that a node must carry."""
    termination_grace_period_seconds: Annotated[int, Field(ge=1, le=86_400)] = 60
    """Time to end in order before a pod is killed."""


class TrainerRole(RoleSpec):
    """The run's controller, rollout workers and learner ranks."""

    learner_ranks: Annotated[int, Field(ge=1, le=1_024)] = 1
    """Data-parallel learner processes."""
    rollout_workers: Annotated[int, Field(ge=1, le=1_024)] = 1
    """Processes that drive rollouts."""
    threads_per_rank: Annotated[int, Field(ge=1, le=256)] = 1
    """CPU threads of each learner rank."""
    micro_batch_tokens: Annotated[int, Field(ge=64, le=10_000_000)] = 8_192
    """Padded tokens of one forward and backward pass."""


class InferenceRole(RoleSpec):
    """The engines that serve the policy."""

    replicas: Annotated[int, Field(ge=1, le=1_024)] = 1
    """Engines, each behind its own address."""
    max_model_len: Annotated[int, Field(ge=16, le=1_048_576)] = 32_768
    """Longest prompt plus completion, in tokens."""
    max_concurrent: Annotated[int, Field(ge=1, le=4_096)] = 64
    """Requests that one engine runs at once."""
    kv_cache_mib: Annotated[int, Field(ge=16, le=1_048_576)] | None = None
    """CPU engines: memory of the KV cache; 1 GiB unless set."""


class EnvironmentRole(Model):
    """Environments of this run: an existing pool, or one made for it."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="has(self.poolRef) != has(self.poolTemplate)",
            holds=lambda s: (s.pool_ref is None) != (s.pool_template is None),
            message="give exactly one of poolRef and poolTemplate",
        ),
    )

    name: Name
    """Name that task sets refer to."""
    pool_ref: NameRef | None = None
    """An EnvPool of the same namespace."""
    pool_template: EnvPoolSpec | None = None
    """A pool owned by the run and deleted with it."""
    template: Name
    """Template of the pool in which this run's tasks start."""


class RewardFunction(Model):
    """One part of the rubric."""

    name: Name
    """Name of this part in records and curves."""
    function: Literal["Verifier", "LengthPenalty", "BrokenCalls", "Unfinished"]
    """See the rewards reference."""
    weight: Fraction = "1"
    """Share in the sum; penalties are subtracted."""
    parameters: dict[str, JsonValue] = Field(default_factory=dict, max_length=32)
    """Checked against the function's own model; an unknown key is refused."""
    timeout_seconds: Annotated[int, Field(ge=1, le=3_600)] = 300
    """Limit of one evaluation."""


class RewardsRole(RoleSpec):
    """The service that scores finished rollouts."""

    functions: Annotated[tuple[RewardFunction, ...], Field(min_length=1, max_length=32)]
    """The rubric."""


class Roles(Model):
    """The processes of a run."""

    trainer: TrainerRole = Field(default_factory=TrainerRole)
    """Controller, rollout workers and learner ranks."""
    inference: InferenceRole | None = None
    """Engines; needed by reinforcement learning."""
    environments: Annotated[tuple[EnvironmentRole, ...], Field(max_length=32)] = ()
    """Environment pools; needed by reinforcement learning."""
    rewards: RewardsRole | None = None
    """Reward service; needed by reinforcement learning."""


class Weights(Model):
    """How policy versions travel from the trainer to the engines."""

    dtype: Literal["Float32", "BFloat16"] = "BFloat16"
    """Number format of published versions and of the engines; training keeps fp32 masters."""
    timeout_seconds: Annotated[int, Field(ge=1, le=86_400)] = 600
    """Longest wait for an engine to serve a published version."""
    keep_versions: Annotated[int, Field(ge=2, le=10_000)] = 4
    """Newest versions kept in the store, beside those that checkpoints name."""


class Checkpointing(Model):
    """When complete states are saved and which are kept."""

    every_steps: Annotated[int, Field(ge=1, le=1_000_000)] = 10
    """Optimiser steps between checkpoints, within each phase."""
    keep_last: Annotated[int, Field(ge=1, le=1_000)] = 3
    """Newest verified checkpoints that are kept."""
    on_suspend: Literal["Always", "Skip"] = "Always"
    """Whether suspending saves first."""
    timeout_seconds: Annotated[int, Field(ge=1, le=86_400)] = 600
    """Longest time one checkpoint may take."""


class Evaluation(Model):
    """A repeated measurement on tasks that are never trained on."""

    name: Name
    """Prefix of its metrics."""
    tasks: TaskSet
    """Held-out tasks."""
    phase: Name
    """Reinforcement-learning phase during which it runs: before its first step, then at its cadence, and at its end."""
    every_steps: Annotated[int, Field(ge=1, le=1_000_000)] = 10
    """Optimiser steps between evaluations."""
    limit: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Tasks per evaluation between the first and the last; all of them unless set."""
    greedy: Literal["Always", "Ends", "Never"] = "Ends"
    """When a greedy pass runs beside the sampled one: at each evaluation, at first and last, never."""


class FailurePolicy(Model):
    """How often a run may restart."""

    max_restarts: Annotated[int, Field(ge=0, le=1_000)] = 3
    """Restarts of a role after failures, before the run fails."""
    reset_after_steps: Annotated[int, Field(ge=1, le=1_000_000)] = 50
    """Clean steps after which the count starts again."""


class Deadlines(Model):
    """Limits on time without result."""

    pre_running_seconds: Annotated[int, Field(ge=1, le=31_536_000)] | None = None
    """From acceptance to the first report of the controller."""
    active_seconds: Annotated[int, Field(ge=1, le=31_536_000)] | None = None
    """Total time with pods."""
    step_progress_seconds: Annotated[int, Field(ge=1, le=31_536_000)] | None = None
    """Longest time without a finished step; derived from measured steps unless set."""


class Observability(Model):
    """Where signals go."""

    otlp_endpoint: Annotated[str, Field(max_length=512, pattern=r"^https?://")] | None = None
    """OTLP gRPC endpoint for traces; traces.jsonl in the run's prefix unless set."""


class RLRunSpec(Model):
    """What a run should be."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="self.phases.all(p, self.phases.exists_one(q, q.name == p.name))",
            holds=lambda s: len({p.name for p in s.phases}) == len(s.phases),
            message="phase names must be unique",
            field_path=".phases",
        ),
        Rule(
            cel="!self.phases.exists(p, p.type == 'ReinforcementLearning') || (has(self.roles.inference) && has(self.roles.environments) && size(self.roles.environments) > 0 && has(self.roles.rewards))",
            holds=lambda s: (
                not any(p.is_rl for p in s.phases)
                or (
                    s.roles.inference is not None
                    and len(s.roles.environments) > 0
                    and s.roles.rewards is not None
                )
            ),
            message="a ReinforcementLearning phase needs roles.inference, roles.environments and roles.rewards",
            field_path=".roles",
        ),
        Rule(
            cel="self.phases.all(p, !has(p.tasks) || p.tasks.all(t, has(self.roles.environments) && self.roles.environments.exists(e, e.name == t.environment)))",
            holds=lambda s: all(
                t.environment in {e.name for e in s.roles.environments}
                for p in s.phases
                for t in p.tasks or ()
            ),
            message="every tasks[].environment must name an entry of roles.environments",
            field_path=".phases",
        ),
        Rule(
            cel="!has(self.evaluation) || self.evaluation.all(e, self.phases.exists(p, p.name == e.phase && p.type == 'ReinforcementLearning'))",
            holds=lambda s: all(
                e.phase in {p.name for p in s.phases if p.is_rl} for e in s.evaluation
            ),
            message="every evaluation[].phase must name a ReinforcementLearning phase",
            field_path=".evaluation",
        ),
    )

    suspend: bool = False
    """True saves a checkpoint, releases the pods and keeps the object; false resumes."""
    model: ModelSource
    """Starting weights."""
    storage: Storage
    """Where everything durable of the run lives."""
    phases: Annotated[tuple[Phase, ...], Field(min_length=1, max_length=16)]
    """Training stages, in order."""
    roles: Roles
    """The processes of the run."""
    weights: Weights = Field(default_factory=Weights)
    """How policy versions travel."""
    checkpointing: Checkpointing = Field(default_factory=Checkpointing)
    """When states are saved."""
    evaluation: Annotated[tuple[Evaluation, ...], Field(max_length=16)] = ()
    """Measurements on held-out tasks."""
    failure_policy: FailurePolicy = Field(default_factory=FailurePolicy)
    """How often the run may restart."""
    deadlines: Deadlines = Field(default_factory=Deadlines)
    """Limits on time without result."""
    observability: Observability = Field(default_factory=Observability)
    """Where signals go."""
