"""RLRun: one post-training run from a model folder to a better policy."""

import hashlib
import json
import re
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from etude.common import hub_uri
from etude.common.api.meta import NAMED, Model, ModelUri, Name, NameRef, Rule
from etude.common.api.observability import Observability
from etude.common.api.pool.network import RunNetwork
from etude.common.api.run.checkpointing import Checkpointing
from etude.common.api.run.lifecycle import (
    MANAGER,
    OPERATOR,
    Budget,
    Deadlines,
    DeletionRule,
    FailurePolicy,
    Seconds,
)
from etude.common.api.run.phases import Phase, TaskSet
from etude.common.api.run.roles import Roles
from etude.common.api.run.rollout_policy import RolloutPolicy
from etude.common.api.run.scheduling import Scheduling
from etude.common.api.run.weights import Weights
from etude.common.api.storage import Storage

DEFAULT_ROLLOUT = RolloutPolicy()
"""What holds for a ReinforcementLearning phase without `rollout`."""


PRINTABLE = r"^[!-~]+$"
NewToken = Annotated[str, Field(min_length=2, max_length=64, pattern=PRINTABLE)]
"""Text of a token that is added to a tokenizer."""


class Chat(Model):
    """Form of conversations."""

    template: Literal["Own", "Plain"] = "Own"
    """Own is the chat template of the model's folder. Plain is for base models without one: roles
    and ends are tokens, which the tokenizer has or addTokens adds. The trainer writes the folder
    with this template into spec.storage once; engines and checkpoints have it."""


class ModelSource(Model):
    """Source of the starting weights."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="has(self.uri) != has(self.checkpointRef)",
            holds=lambda s: (s.uri is None) != (s.checkpoint_ref is None),
            message="give exactly one of uri and checkpointRef",
            fix="keep uri for a model folder, checkpointRef for the model of a checkpoint",
        ),
        Rule(
            cel="!has(self.secretRef) || (has(self.uri) && self.uri.startsWith('hf://'))",
            holds=lambda s: s.secret_ref is None or (s.uri or "").startswith(hub_uri.SCHEME),
            message="secretRef is for a uri that begins with hf://",
            fix="remove secretRef, or name the model as hf://organisation/name@revision",
        ),
    )

    uri: ModelUri | None = None
    """A Hugging Face model folder: s3://bucket/prefix, file:///folder, or
    hf://organisation/name@revision on a hub. The trainer pins the revision to a commit and copies
    safetensors, tokenizer and configuration into spec.storage once, with their digests; nothing
    else asks the hub. Without weight files in the folder, weights are drawn from seed."""
    secret_ref: NameRef | None = None
    """Secret with HF_TOKEN and, for a hub other than huggingface.co, HF_ENDPOINT; for the trainer
    alone."""
    checkpoint_ref: NameRef | None = None
    """A Checkpoint of this namespace that holds a model: one of reason Window, PhaseEnd, Final,
    Manual or Imported. Its store is reached as spec.storage says. It is not superseded while a run
    names it."""
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    """Seed of freshly drawn weights."""
    add_tokens: Annotated[tuple[NewToken, ...], Field(max_length=1_024)] = ()
    """Texts that become one special token each; those that the tokenizer has stay as they are. The
    embedding and the output layer get a row for each, the mean of all others. The trainer writes
    the larger model into spec.storage once; engines and checkpoints have its folder."""
    chat: Chat = Field(default_factory=Chat)
    """Form of conversations."""

    @property
    def folder(self) -> str:
        """Folder of the model.

        Raises:
            ValueError: only the operator knows: this is no spec that it gave to a process.
        """
        if self.uri is None:
            raise ValueError("model.checkpointRef is unresolved")
        return self.uri

    @property
    def key(self) -> str:
        """Name of the folder that the run starts from: its URI, and a digest of the changes.

        Raises:
            ValueError: as `folder`.
        """
        if not self.add_tokens and self.chat.template == "Own":
            return self.folder
        changes = json.dumps([self.add_tokens, self.chat.template])
        return f"{self.folder}#{hashlib.sha256(changes.encode()).hexdigest()[:32]}"


def has_changes(key: str) -> bool:
    """True if the key of a model names one that a run changes."""
    return re.search(r"#[0-9a-f]{32}$", key) is not None


class Evaluation(Model):
    """A repeated measurement on tasks that are never trained on."""

    name: Name
    """Prefix of its metrics."""
    tasks: TaskSet
    """Held-out tasks."""
    phase: Name
    """Reinforcement-learning phase to measure: before its first step, at a cadence, at its end."""
    every_steps: Annotated[int, Field(ge=1, le=1_000_000)] = 10
    """Optimiser steps between evaluations."""
    limit: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Tasks per evaluation between the first and the last; all of them unless set."""
    samples: Annotated[int, Field(ge=1, le=64)] = 1
    """Rollouts of each task in the sampled pass, for the mean and the best of several."""
    greedy: Literal["Always", "Ends", "Never"] = "Ends"
    """When a greedy pass runs too: at each evaluation, at the first and the last, never."""


class RLRunSpec(Model):
    """Desired state of a run."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="self.phases.all(p, self.phases.exists_one(q, q.name == p.name))",
            holds=lambda s: len({p.name for p in s.phases}) == len(s.phases),
            message="every name of phases must be unique",
            fix="rename one of the phases",
            field_path=".phases",
        ),
        Rule(
            cel="!self.phases.exists(p, p.type == 'ReinforcementLearning')"
            " || (has(self.roles.inference) && has(self.roles.rewards)"
            " && has(self.roles.environments) && size(self.roles.environments) > 0)",
            holds=lambda s: (
                not any(p.is_rl for p in s.phases)
                or (
                    s.roles.inference is not None
                    and len(s.roles.environments) > 0
                    and s.roles.rewards is not None
                )
            ),
            message="a phase of phases with type ReinforcementLearning needs"
            " roles.inference, roles.environments and roles.rewards",
            fix="add the roles that are missing; examples/demo/rlrun.yaml has all of them",
            field_path=".roles",
        ),
        Rule(
            cel="self.phases.all(p, !has(p.tasks) || p.tasks.all(t, has(self.roles.environments)"
            " && self.roles.environments.exists(e, e.name == t.environment)))",
            holds=lambda s: all(
                t.environment in {e.name for e in s.roles.environments}
                for p in s.phases
                for t in p.tasks or ()
            ),
            message="every tasks[].environment must name an entry of roles.environments",
            fix="name an entry of roles.environments, or add one of that name",
            field_path=".phases",
        ),
        Rule(
            cel="self.phases.filter(p, has(p.contextExtension)"
            " || p.type in ['ReinforcementLearning', 'Feedback'])"
            ".map(p, p.type in ['ReinforcementLearning', 'Feedback'] ? 1 : 0).isSorted()"
            " && self.phases.all(p, !has(p.contextExtension)"
            " || p.type != 'ReinforcementLearning')",
            holds=lambda s: all(
                p.context_extension is None
                for place, p in enumerate(s.phases)
                if any(each.is_rl or each.is_feedback for each in s.phases[: place + 1])
            ),
            message="contextExtension must be in a phase before the first of type"
            " ReinforcementLearning or Feedback: engines cannot change positions while they run",
            fix="move it to a supervised phase before, or train the longer context in another run",
            field_path=".phases",
        ),
        Rule(
            cel="!has(self.evaluation) || self.evaluation.all(e, self.phases.exists(p,"
            " p.name == e.phase && p.type == 'ReinforcementLearning'))",
            holds=lambda s: all(
                e.phase in {p.name for p in s.phases if p.is_rl} for e in s.evaluation
            ),
            message="every evaluation[].phase must be the name of one of phases, of type"
            " ReinforcementLearning",
            fix="name a phase of type ReinforcementLearning",
            field_path=".evaluation",
        ),
        Rule(
            cel="!has(self.evaluation) || self.evaluation.all(e, has(self.roles.environments)"
            " && self.roles.environments.exists(r, r.name == e.tasks.environment))",
            holds=lambda s: all(
                e.tasks.environment in {r.name for r in s.roles.environments} for e in s.evaluation
            ),
            message="every evaluation[].tasks.environment must name an entry of roles.environments",
            fix="name an entry of roles.environments, or add one of that name",
            field_path=".evaluation",
        ),
        Rule(
            cel="!has(self.roles.inference) || self.phases.all(p,"
            " p.type != 'ReinforcementLearning' || (has(p.rollout) ? (has(p.rollout.summaries)"
            " ? p.rollout.summaries.contextTokens : p.rollout.maxTokens)"
            f" : {DEFAULT_ROLLOUT.max_tokens}) <= self.roles.inference.maxModelLen)",
            holds=lambda s: (
                s.roles.inference is None
                or all(
                    (p.rollout or DEFAULT_ROLLOUT).context_tokens <= s.roles.inference.max_model_len
                    for p in s.phases
                    if p.is_rl
                )
            ),
            message="phases[].rollout.maxTokens, or its summaries.contextTokens, must not be above"
            " roles.inference.maxModelLen where type is ReinforcementLearning (without a rollout"
            f" it is {DEFAULT_ROLLOUT.max_tokens}): an engine takes no longer prompt",
            fix="set rollout.maxTokens to roles.inference.maxModelLen or less, or set"
            " rollout.summaries for longer transcripts",
            field_path=".phases",
        ),
        Rule(
            cel="!has(self.roles.inference) || self.weights.advanced.codec in ['Auto', 'L1']"
            " || self.weights.advanced.tileGrid"
            " % (self.roles.inference.gpusPerReplica > 0"
            " ? self.roles.inference.gpusPerReplica : 1) == 0",
            holds=lambda s: (
                s.roles.inference is None
                or s.weights.advanced.codec in {"Auto", "L1"}
                or s.weights.advanced.tile_grid % max(1, s.roles.inference.gpus_per_replica) == 0
            ),
            message="codecs L2 and L2r code whole tiles: roles.inference.gpusPerReplica must divide"
            " weights.advanced.tileGrid",
            fix="raise tileGrid to a multiple of gpusPerReplica, or use codec L1",
            field_path=".weights.advanced.codec",
        ),
        Rule(
            cel="self.roles.trainer.gpusPerReplica == 0"
            " || (self.scheduling.workload == 'RayCluster'"
            " ? self.roles.trainer.learnerRanks % self.roles.trainer.gpusPerReplica == 0"
            " : self.roles.trainer.learnerRanks == self.roles.trainer.gpusPerReplica)",
            holds=lambda s: (
                s.roles.trainer.gpus_per_replica == 0
                or (
                    s.roles.trainer.learner_ranks % s.roles.trainer.gpus_per_replica == 0
                    if s.scheduling.kind == "RayCluster"
                    else s.roles.trainer.learner_ranks == s.roles.trainer.gpus_per_replica
                )
            ),
            message="each GPU of the trainer has one learner rank: learnerRanks must be"
            " gpusPerReplica, or with scheduling.workload RayCluster a multiple of it",
            fix="set learnerRanks to gpusPerReplica; for ranks of several pods set"
            " scheduling.workload: RayCluster",
            field_path=".roles.trainer.learnerRanks",
        ),
        Rule(
            cel="self.phases.all(p, !has(p.gate) || (has(self.evaluation)"
            " && self.evaluation.exists(e, e.name == p.gate.evaluation && e.phase == p.name"
            " && (p.gate.metric == 'Success' || e.greedy != 'Never'))))",
            holds=lambda s: all(
                any(
                    e.name == p.gate.evaluation
                    and e.phase == p.name
                    and (p.gate.metric == "Success" or e.greedy != "Never")
                    for e in s.evaluation
                )
                for p in s.phases
                if p.gate is not None
            ),
            message="every phases[].gate must name an evaluation of its own phase, and with metric"
            " GreedySuccess one with a greedy pass",
            fix="add an entry to evaluation with phase: the gate's, and greedy: Ends or Always",
            field_path=".phases",
        ),
        Rule(
            cel="!has(self.checkpointing.keepBest)"
            " || self.checkpointing.keepBest.metric != 'EvalSuccess'"
            " || (has(self.evaluation) && size(self.evaluation) > 0)",
            holds=lambda s: (
                s.checkpointing.keep_best is None
                or s.checkpointing.keep_best.metric != "EvalSuccess"
                or bool(s.evaluation)
            ),
            message="keepBest on EvalSuccess needs an evaluation: without one no checkpoint has"
            " that figure",
            fix="add an entry to evaluation, or use metric: Reward",
            field_path=".checkpointing.keepBest.metric",
        ),
        Rule(
            cel="!has(self.roles.inference) || !has(self.roles.inference.maxReplicas)"
            " || (self.scheduling.admission == 'None' && self.scheduling.workload != 'JobSet')",
            holds=lambda s: (
                s.roles.inference is None
                or s.roles.inference.max_replicas is None
                or (s.scheduling.admission == "None" and s.scheduling.kind != "JobSet")
            ),
            message="maxReplicas needs scheduling.admission None, and a workload that is no"
            " JobSet: these hold a fixed number of pods",
            fix="remove minReplicas, maxReplicas and autoscaling, or scheduling.admission and"
            " workload",
            field_path=".roles.inference.maxReplicas",
        ),
        Rule(
            cel="!has(self.ttlSecondsAfterFinished) || !has(self.deletionRules)"
            " || size(self.deletionRules) == 0",
            holds=lambda s: s.ttl_seconds_after_finished is None or not s.deletion_rules,
            message="ttlSecondsAfterFinished and deletionRules exclude each other",
            fix="keep deletionRules, with {after, policy: DeleteSelf, ttlSeconds} for the run",
            field_path=".deletionRules",
        ),
    )

    suspend: bool = False
    """True saves a checkpoint, releases the pods and keeps the object; false resumes."""
    managed_by: Annotated[str, Field(max_length=253, pattern=MANAGER)] = OPERATOR
    """Who reconciles the run; with another name this operator leaves it alone. Never changes."""
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
    evaluation: Annotated[tuple[Evaluation, ...], Field(max_length=16), NAMED] = ()
    """Measurements on held-out tasks."""
    scheduling: Scheduling = Field(default_factory=Scheduling)
    """How its pods get their nodes."""
    failure_policy: FailurePolicy = Field(default_factory=FailurePolicy)
    """What failures lead to, and how often the run may restart."""
    deadlines: Deadlines = Field(default_factory=Deadlines)
    """Limits on time without result."""
    budget: Budget = Field(default_factory=Budget)
    """What the run may use in all."""
    network: RunNetwork = Field(default_factory=RunNetwork)
    """What its pods may reach."""
    ttl_seconds_after_finished: Seconds | None = None
    """Deletes the run, with everything that it owns, so long after its end; never unless set."""
    deletion_rules: Annotated[tuple[DeletionRule, ...], Field(max_length=8)] = ()
    """What goes once the run is over, in steps."""
    observability: Observability = Field(default_factory=Observability)
    """Where signals go."""
