"""Roles: the processes of a run, their size and settings."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, JsonValue

from etude.common.api.meta import (
    NAMED,
    Fraction,
    Model,
    Name,
    NameRef,
    Rule,
)
from etude.common.api.pool.spec import EnvPoolSpec
from etude.common.api.run.http_gateway import PolicyGateway
from etude.common.api.run.rewards import FUNCTION, JUDGED, find_endpoint
from etude.common.api.run.role_spec import EngineRole, RoleSpec


class Lora(Model):
    """Low-rank adapters of linear layers, which alone are trained.

    Source: LoRA: Low-Rank Adaptation of Large Language Models, https://arxiv.org/abs/2106.09685.
    """

    rank: Annotated[int, Field(ge=1, le=1_024)] = 16
    """Rank of each adapter's product B A."""
    alpha: Annotated[int, Field(ge=1, le=65_536)] = 32
    """The product is scaled by alpha / rank."""
    target_modules: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=256)], ...], Field(max_length=64)
    ] = ()
    """Layers with an adapter, by the ends of their names, for example q_proj or mlp.down_proj; all
    linear layers of the blocks unless given."""

    @property
    def scale(self) -> float:
        """Factor of the product."""
        return self.alpha / self.rank


class LearnerMesh(Model):
    """Mesh of learner ranks that share the weights (HSDP), tokens of long rows, and experts."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="self.shard * self.context % self.expert == 0",
            holds=lambda s: s.shard * s.context % s.expert == 0,
            message="mesh.expert must divide shard times context: ranks of one copy of the weights"
            " divide its experts",
            fix="set expert to a divisor of shard times context, or leave it out",
            field_path=".expert",
        ),
    )

    shard: Annotated[int, Field(ge=1, le=1_024)]
    """Shares of the batch that one copy of weights and optimiser state trains, each on one rank, or
    on context ranks. Every rank of a copy has a shard of it; they follow each other, so they are on
    one host if it has room."""
    replicate: Annotated[int, Field(ge=1, le=1_024)] = 1
    """Copies; more of them need more memory, and fewer bytes cross between hosts."""
    context: Annotated[int, Field(ge=1, le=1_024)] = 1
    """Ranks that share the tokens of each row, for sequences longer than one GPU holds; it divides
    the model's attention heads. A copy's weights are spread over its shard times context ranks."""
    expert: Annotated[int, Field(ge=1, le=1_024)] = 1
    """Ranks of a copy that divide the experts of each layer of a mixture, and exchange tokens for
    results; it divides shard times context, and the number of experts."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.shard * self.replicate * self.context


class TrainerRole(RoleSpec):
    """The run's controller, rollout workers and learner ranks."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="!has(self.mesh) || self.mesh.shard * self.mesh.replicate * self.mesh.context"
            " == self.learnerRanks",
            holds=lambda s: s.mesh is None or s.mesh.size == s.learner_ranks,
            message="mesh.shard times mesh.replicate times mesh.context must be learnerRanks: each"
            " rank has one place in the mesh",
            fix="set learnerRanks to the product, or leave mesh out to shard over all ranks",
            field_path=".mesh",
        ),
        Rule(
            cel="!has(self.mesh) || self.mesh.context == 1 || self.packing != 'Padded'",
            holds=lambda s: s.mesh is None or s.mesh.context == 1 or s.packing != "Padded",
            message="mesh.context above 1 shares packed rows, which packing Padded has none of",
            fix="set packing: Packed, or mesh.context: 1",
            field_path=".packing",
        ),
        Rule(
            cel="!self.cpuOffload || (self.learnerRanks > 1 && (self.gpusPerReplica > 0"
            " || (has(self.resourceClaims) && size(self.resourceClaims) > 0)))",
            holds=lambda s: not s.cpu_offload or (s.learner_ranks > 1 and s.has_gpus),
            message="cpuOffload needs gpusPerReplica or resourceClaims, and learnerRanks above 1:"
            " it moves the shards of several ranks from GPUs to their hosts",
            fix="remove cpuOffload, or set gpusPerReplica and learnerRanks",
            field_path=".cpuOffload",
        ),
        Rule(
            cel="!self.cpuOffload || !has(self.lora)",
            holds=lambda s: not s.cpu_offload or s.lora is None,
            message="cpuOffload and lora exclude each other: adapters are complete on every GPU",
            fix="remove one of them; lora alone has few gradients and moments",
            field_path=".cpuOffload",
        ),
    )

    learner_ranks: Annotated[int, Field(ge=1, le=1_024)] = 1
    """Learner processes."""
    mesh: LearnerMesh | None = None
    """Axes of the ranks; one copy sharded over all of them unless set."""
    rollout_workers: Annotated[int, Field(ge=1, le=1_024)] = 1
    """Processes that drive rollouts."""
    threads_per_rank: Annotated[int, Field(ge=1, le=256)] = 1
    """CPU threads of each learner rank."""
    micro_batch_tokens: Annotated[int, Field(ge=64, le=10_000_000)] = 8_192
    """Tokens of one forward and backward pass, padding included; ranks of mesh.context share
    them."""
    packing: Literal["Auto", "Packed", "Padded"] = "Auto"
    """Whether sequences of one pass share a row without padding, each with attention of its own.
    Auto packs on GPUs, for models whose attention allows it; Packed is refused for others."""
    activation_checkpointing: Literal["None", "Blocks", "Selective"] = "None"
    """What the backward pass computes again instead of keeping it: Blocks all of each block,
    Selective all but the results of attention."""
    compile_blocks: bool = False
    """Compile each block of the model on its first pass (torch.compile)."""
    lora: Lora | None = None
    """Train low-rank adapters and keep all other weights as they are; all weights are trained
    unless given."""
    cpu_offload: bool = False
    """Keep weights, gradients and moments in the host's memory, and update them there: GPUs have
    room for longer passes, and steps take longer."""

    @property
    def ranks_per_pod(self) -> int:
        """Learner ranks that share the memory of a pod."""
        return self.gpus_per_replica or self.learner_ranks


class EngineScaling(Model):
    """Scaling of the number of engines by the time of steps."""

    mode: Literal["Fixed", "StepTime"] = "Fixed"
    """Fixed keeps replicas; StepTime has as many engines as let a step take targetStepSeconds."""
    target_step_seconds: Annotated[int, Field(ge=1, le=86_400)] | None = None
    """StepTime: what a step should take, sampling and training together."""


class InferenceRole(EngineRole):
    """The engines that serve the policy."""

    rules: ClassVar[tuple[Rule, ...]] = (
        *EngineRole.rules,
        Rule(
            cel="self.evaluationReplicas < (has(self.minReplicas) ? self.minReplicas"
            " : self.replicas)",
            holds=lambda s: s.evaluation_replicas < s.least_replicas,
            message="evaluationReplicas must be below replicas and minReplicas: one engine is for"
            " training",
            fix="raise replicas (StepTime: minReplicas), or lower evaluationReplicas",
            field_path=".evaluationReplicas",
        ),
        Rule(
            cel="self.autoscaling.mode == 'StepTime' ? has(self.minReplicas)"
            " && has(self.maxReplicas) && has(self.autoscaling.targetStepSeconds)"
            " : !has(self.minReplicas) && !has(self.maxReplicas)"
            " && !has(self.autoscaling.targetStepSeconds)",
            holds=lambda s: (
                len({s.autoscaling.mode == "StepTime", *(g is not None for g in s.scaling)}) == 1
            ),
            message="minReplicas, maxReplicas and autoscaling.targetStepSeconds go together with"
            " autoscaling.mode StepTime, and with no other",
            fix="give all three with mode: StepTime, or none of them",
            field_path=".autoscaling",
        ),
        Rule(
            cel="!has(self.minReplicas) || !has(self.maxReplicas)"
            " || (self.minReplicas <= self.replicas && self.replicas <= self.maxReplicas)",
            holds=lambda s: (
                s.min_replicas is None
                or s.max_replicas is None
                or s.min_replicas <= s.replicas <= s.max_replicas
            ),
            message="replicas must be within minReplicas and maxReplicas: the run begins with it",
            fix="set replicas between the two",
            field_path=".replicas",
        ),
    )

    replicas: Annotated[int, Field(ge=1, le=1_024)] = 1
    """Engines, each behind its own address; with StepTime those that the run begins with."""
    min_replicas: Annotated[int, Field(ge=1, le=1_024)] | None = None
    """StepTime: engines at least."""
    max_replicas: Annotated[int, Field(ge=1, le=1_024)] | None = None
    """StepTime: engines at most."""
    autoscaling: EngineScaling = Field(default_factory=EngineScaling)
    """Whether their number follows the steps; it changes between two versions only."""
    evaluation_replicas: Annotated[int, Field(ge=0, le=1_023)] = 0
    """Engines, the first of them, that serve evaluations and nothing else; 0: all serve both."""
    gateway: PolicyGateway | None = None
    """Where the policy's OpenAI endpoint is reached from outside the cluster, by the Gateway API;
    nowhere unless set. Engines ask for no key: the Gateway must."""

    @property
    def scaling(self) -> tuple[int | None, ...]:
        """Fields that only StepTime has."""
        return (self.min_replicas, self.max_replicas, self.autoscaling.target_step_seconds)

    @property
    def least_replicas(self) -> int:
        """Engines that there are in any case."""
        return self.min_replicas or self.replicas

    @property
    def most_replicas(self) -> int:
        """Engines that there may be."""
        return self.max_replicas or self.replicas


class EnvironmentRole(Model):
    """Environments of this run: an existing pool, or one made for it."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="has(self.poolRef) != has(self.poolTemplate)",
            holds=lambda s: (s.pool_ref is None) != (s.pool_template is None),
            message="give exactly one of poolRef and poolTemplate",
            fix="keep poolRef for a pool that exists, poolTemplate for one of the run's own",
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

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="self.function == 'Verifier' || !has(self.timeoutSeconds)",
            holds=lambda s: s.function == "Verifier" or s.timeout_seconds is None,
            message="only a Verifier has timeoutSeconds: every other function is a formula",
            fix="remove timeoutSeconds",
            field_path=".timeoutSeconds",
        ),
    )

    name: Name
    """Name of this part in records and curves."""
    function: Annotated[str, Field(max_length=128, pattern=FUNCTION)]
    """See the rewards reference; acme.Coverage is what an installed package registers so."""
    weight: Fraction = "1"
    """Share in the sum; penalties are subtracted."""
    parameters: dict[str, JsonValue] = Field(default_factory=dict, max_length=32)
    """Checked against the function's own model; an unknown key is refused."""
    timeout_seconds: Annotated[int, Field(ge=1, le=3_600)] | None = None
    """Verifier: limit of one evaluation; 300 unless set."""

    @property
    def limit_s(self) -> int:
        """Longest time of one evaluation."""
        return self.timeout_seconds or 300


class RewardsRole(RoleSpec):
    """The service that scores finished rollouts."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="self.functions.exists_one(f, f.function == 'Verifier')",
            holds=lambda s: sum(f.function == "Verifier" for f in s.functions) == 1,
            message="exactly one of the functions must have function Verifier",
            fix="add {name: success, function: Verifier}, or remove all but one of them",
            field_path=".functions",
        ),
        Rule(
            cel="!has(self.secretRef)"
            " || self.functions.exists(f, f.function in ['Judge', 'Hacks'])",
            holds=lambda s: s.secret_ref is None or any(f.function in JUDGED for f in s.functions),
            message="secretRef is for endpoints:"
            " one of the functions must have function Judge or Hacks",
            fix="remove secretRef, or add a function Judge or Hacks",
            field_path=".secretRef",
        ),
    )

    functions: Annotated[tuple[RewardFunction, ...], Field(min_length=1, max_length=32), NAMED]
    """The rubric."""
    secret_ref: NameRef | None = None
    """Secret with JUDGE_API_KEY, the bearer token for endpoints of Judge and Hacks functions."""

    @property
    def judge_endpoints(self) -> tuple[str, ...]:
        """URLs that the functions call. What is no URL is refused where parameters are read."""
        judges = (each for each in self.functions if each.function in JUDGED)
        return tuple(filter(None, (find_endpoint(each.parameters) for each in judges)))


class Roles(Model):
    """The processes of a run."""

    trainer: TrainerRole = Field(default_factory=TrainerRole)
    """Controller, rollout workers and learner ranks."""
    inference: InferenceRole | None = None
    """Engines; needed by reinforcement learning."""
    environments: Annotated[tuple[EnvironmentRole, ...], Field(max_length=32), NAMED] = ()
    """Environment pools; needed by reinforcement learning."""
    rewards: RewardsRole | None = None
    """Reward service; needed by reinforcement learning."""
