"""Phases: the training stages of a run."""

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, ClassVar, Literal

from pydantic import Field, JsonValue

from etude.common.api.meta import NAMED, Fraction, Model, Name, Rule, Uri, number
from etude.common.api.run.async_limits import AsyncLimits
from etude.common.api.run.context_extension import ContextExtension
from etude.common.api.run.curriculum import CurriculumChoice
from etude.common.api.run.phase_goals import Gate, MonitorRule, SuccessPolicy
from etude.common.api.run.phase_rules import GROUP_SIZE, PHASE_RULES, PROMPTS_PER_STEP
from etude.common.api.run.rollout_policy import TrainingRolloutPolicy
from etude.common.api.run.router_replay import RouterReplay

MAX_RELEASE_LAG = 1
"""Trained windows by which the version of a window may be behind the trainer."""


class PhaseType(StrEnum):
    """Kind of training of a phase."""

    CONTINUED_PRETRAINING = "ContinuedPretraining"
    SUPERVISED_FINE_TUNING = "SupervisedFineTuning"
    REINFORCEMENT_LEARNING = "ReinforcementLearning"
    FEEDBACK = "Feedback"


class HeldOutDataset(Model):
    """Transcripts or texts, from their beginning."""

    name: Name
    """Shown in errors and figures about it."""
    uri: Uri
    """A JSON-lines file: {"messages": […]} per line for chats, {"text": …} for plain text. With
    batchTokens also .jsonl.gz, .jsonl.zst, .parquet, or a folder of such files."""
    context_weight: Fraction = "0"
    """Loss weight of tokens that the assistant did not write; its own have 1."""


class Dataset(HeldOutDataset):
    """Transcripts to learn from."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="double(self.weight) > 0.0",
            holds=lambda s: number(s.weight) > 0,
            message="weight must be above 0: with 0 the dataset is never read",
            fix="give a share, or remove the dataset",
            field_path=".weight",
        ),
    )

    weight: Fraction = "1"
    """With batchTokens: share of the tokens, relative to the other datasets."""


class Validation(Model):
    """Held-out loss of a supervised phase."""

    data: Annotated[tuple[HeldOutDataset, ...], Field(min_length=1, max_length=32), NAMED]
    """Data that is not trained on; any kind of file."""
    every_steps: Annotated[int, Field(ge=1, le=1_000_000)] = 100
    """Steps between two measurements; there is one before the first step and one at the end."""
    max_tokens: Annotated[int, Field(ge=1, le=1_000_000_000)] = 262_144
    """Tokens of each dataset, from its beginning."""


class StepProfile(Model):
    """Steps of a phase that torch's profiler records."""

    first_step: Annotated[int, Field(ge=1, le=10_000_000)]
    """First step to record, as rows count them; the first of a process is slower than others."""
    num_steps: Annotated[int, Field(ge=1, le=100)] = 1
    """Steps to record, each in a trace of its own."""


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

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="double(self.learningRate) > 0.0",
            holds=lambda s: number(s.learning_rate) > 0,
            message="learningRate must be above 0: with 0 nothing is learned",
            fix='give a peak rate, for example "3e-4"',
            field_path=".learningRate",
        ),
        Rule(
            cel="double(self.gradientClip) > 0.0",
            holds=lambda s: number(s.gradient_clip) > 0,
            message="gradientClip must be above 0: with 0 nothing is learned",
            fix='give the largest norm, for example "1"; a large number turns clipping off',
            field_path=".gradientClip",
        ),
        Rule(
            cel="double(self.decayStart) <= 1.0",
            holds=lambda s: number(s.decay_start) <= 1,
            message="decayStart must be at most 1: it is a share of the phase",
            fix='give a share of the phase, for example "0.6"',
            field_path=".decayStart",
        ),
        Rule(
            cel="double(self.finalFraction) <= 1.0",
            holds=lambda s: number(s.final_fraction) <= 1,
            message="finalFraction must be at most 1: it is a share of the peak",
            fix='give a share of the peak, for example "0.1"',
            field_path=".finalFraction",
        ),
        Rule(
            cel="double(self.beta1) < 1.0",
            holds=lambda s: number(s.beta1) < 1,
            message="beta1 must be below 1: an average with decay 1 forgets nothing",
            fix='give a decay, for example "0.9"',
            field_path=".beta1",
        ),
        Rule(
            cel="double(self.beta2) < 1.0",
            holds=lambda s: number(s.beta2) < 1,
            message="beta2 must be below 1: an average with decay 1 forgets nothing",
            fix='give a decay, for example "0.95"',
            field_path=".beta2",
        ),
        Rule(
            cel="self.moments != 'BFloat16' || double(self.beta2) <= 0.99",
            holds=lambda s: s.moments != "BFloat16" or number(s.beta2) <= 0.99,
            message="moments BFloat16 needs beta2 of at most 0.99: a slower average rounds to no"
            " change in bf16",
            fix='set beta2: "0.99" or less, or moments: Float32',
            field_path=".beta2",
        ),
        Rule(
            cel="double(self.epsilon) > 0.0",
            holds=lambda s: number(s.epsilon) > 0,
            message="epsilon must be above 0: a parameter without a gradient would become NaN",
            fix='give a small number, for example "1e-8"',
            field_path=".epsilon",
        ),
    )

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
    moments: Literal["Float32", "BFloat16"] = "Float32"
    """Number format of both moments; updates are computed in fp32 with either."""
    on_non_finite: Literal["Stop", "Skip"] = "Stop"
    """A loss or gradient that is NaN or infinite: Stop ends the run, Skip leaves the batch out and
    names it in the record."""
    max_skipped_steps: Annotated[int, Field(ge=1, le=1_000)] = 3
    """Skip: batches in a row that may be left out; the next one ends the run."""
    epsilon: Fraction = "1e-8"
    """Added to the square root of the second moment. Gradients much smaller than it are damped:
    with billions of parameters and a gradient norm below 1e-3, "1e-12" or less is right."""
    expert_bias_rate: Fraction = "0"
    """Rate by which each update moves the biases of routers (DeepSeek-V3's form) towards equal
    loads of the experts; 0 leaves them as they are."""


class MtpTraining(Model):
    """Training of the model's head of multi-token prediction, with which engines guess tokens."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="double(self.lossWeight) > 0.0",
            holds=lambda s: number(s.loss_weight) > 0,
            message="lossWeight must be above 0: with 0 the head learns nothing",
            fix='give a weight, for example "0.2", or remove mtp',
            field_path=".lossWeight",
        ),
    )

    loss_weight: Fraction = "0.2"
    """Weight of the head's loss: the mean cross-entropy of its guesses under the model's own
    predictions. It moves no other weight."""


class Algorithm(Model):
    """Algorithm that turns rewards into gradients."""

    name: Literal[
        "DrGRPO",
        "GRPO",
        "RLOO",
        "PPO",
        "DAPO",
        "GSPO",
        "CISPO",
        "DPPO",
        "SAPO",
        "DecoupledPPO",
    ] = "DrGRPO"
    """See the algorithms reference."""
    group_size: Annotated[int, Field(ge=2, le=1_024)] = GROUP_SIZE
    """Rollouts per prompt."""
    prompts_per_step: Annotated[int, Field(ge=1, le=4_096)] = PROMPTS_PER_STEP
    """Groups per optimiser step."""
    parameters: dict[str, JsonValue] = Field(default_factory=dict, max_length=64)
    """Checked against the algorithm's own model; an unknown key is refused."""


class FeedbackSource(Model):
    """Source of windows, and what one needs to be trained."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="double(self.klBudget) > 0.0",
            holds=lambda s: number(s.kl_budget) > 0,
            message="klBudget must be above 0: with 0 no window is ever trained",
            fix='give nats per token, for example "0.01"',
            field_path=".klBudget",
        ),
    )

    uri: Uri
    """Store of a feedback service, with windows/ and rollouts/; reached as spec.storage says."""
    min_rollouts: Annotated[int, Field(ge=2, le=10_000)] = 64
    """A window with fewer usable rollouts is dropped: its gradient would be noise."""
    max_age_seconds: Annotated[int, Field(ge=60, le=31_536_000)] = 86_400
    """A window that was closed longer ago is dropped when its turn comes."""
    kl_budget: Fraction = "0.01"
    """Mean divergence from the version that served the window, in nats per token, from which the
    rest of the window is dropped. It is measured before each step, on rollouts of that step."""
    steps_per_window: Annotated[int, Field(ge=1, le=64)] = 4
    """Optimiser steps into which the rollouts of a window are cut, at random by the phase's
    seed."""
    max_tokens: Annotated[int, Field(ge=16, le=1_048_576)] = 32_768
    """Tokens of one context of a rollout; a rollout with a longer one is masked. The denominator of
    algorithms whose lossScale is not set."""


class Phase(Model):
    """One training stage."""

    rules: ClassVar[tuple[Rule, ...]] = PHASE_RULES

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
    mtp: MtpTraining | None = None
    """Training of the head of multi-token prediction, which the model must have; none unless
    set."""
    batch_size: Annotated[int, Field(ge=1, le=65_536)] | None = None
    """Supervised phases: sequences per step; 12 unless set. The data is read into memory."""
    batch_tokens: Annotated[int, Field(ge=16, le=1_000_000_000)] | None = None
    """Supervised phases: tokens per step, instead of batchSize. The data is streamed, packed into
    rows of sequenceTokens, and may be of any size."""
    sequence_tokens: Annotated[int, Field(ge=16, le=10_000_000)] | None = None
    """With batchTokens: longest sequence; the model's context, or batchTokens, unless set."""
    context_extension: ContextExtension | None = None
    """Positions of the model in this phase and those after it; before the first phase of type
    ReinforcementLearning, because engines start with the last ones."""
    validation: Validation | None = None
    """Supervised phases: what the held-out loss is measured on; it is not unless set."""
    data: Annotated[tuple[Dataset, ...], Field(min_length=1, max_length=32), NAMED] | None = None
    """Supervised phases: transcripts."""
    tasks: Annotated[tuple[TaskSet, ...], Field(min_length=1, max_length=64), NAMED] | None = None
    """Reinforcement learning: tasks, each used at most once per run."""
    curriculum: CurriculumChoice | None = None
    """Reinforcement learning: which untrained tasks come next; the order of the seed unless set."""
    algorithm: Algorithm | None = None
    """Reinforcement learning: how rewards become gradients. Feedback: how the advantages of a
    window do; its steps are not made of groups, so groupSize and promptsPerStep are left out."""
    feedback: FeedbackSource | None = None
    """Feedback: where windows come from, and when one is trained."""
    async_limits: AsyncLimits | None = None
    """Reinforcement learning: Sync unless set."""
    rollout: TrainingRolloutPolicy | None = None
    """Reinforcement learning: limits of one rollout."""
    router_replay: RouterReplay | None = None
    """Reinforcement learning of mixtures of experts: the experts that tokens take in the learner;
    those of the live routers unless set."""
    profile: StepProfile | None = None
    """Steps whose operations each learner rank writes to the run's store, as a Chrome trace:
    profiles/<phase>/step-<step>-rank-<rank>.json.gz. None unless set."""
    success_policy: SuccessPolicy | None = None
    """Ends the phase before maxSteps; no sooner unless set."""
    gate: Gate | None = None
    """Reinforcement learning: what must hold at its end; nothing unless set."""
    monitors: (
        Annotated[tuple[MonitorRule, ...], Field(min_length=1, max_length=6), NAMED] | None
    ) = None
    """Reinforcement learning: what monitors do beyond their events; nothing unless set."""

    @property
    def is_rl(self) -> bool:
        return self.type == PhaseType.REINFORCEMENT_LEARNING

    @property
    def is_feedback(self) -> bool:
        return self.type == PhaseType.FEEDBACK


def inherit_context(phases: Sequence[Phase]) -> list[Phase]:
    """Phases, each with the context extension that holds in it: its own, or the last before."""
    inherited: list[Phase] = []
    extension = None
    for phase in phases:
        extension = phase.context_extension or extension
        inherited.append(phase.model_copy(update={"context_extension": extension}))
    return inherited
