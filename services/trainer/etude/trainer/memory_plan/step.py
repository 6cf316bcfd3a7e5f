"""One step of a learner rank on tensors without values: the product's own passes and optimiser."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives  # noqa: F401 - collectives without values
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

from etude.common.api.run.phases import Phase
from etude.common.api.run.roles import Lora
from etude.common.errors import Problem, UserError
from etude.trainer.learner.checkpoint.shard_memory import ShardMemory
from etude.trainer.learner.gradients import backward_rows, reference_scorer
from etude.trainer.learner.guesses import add_guesses
from etude.trainer.learner.objective import Objective, PolicyObjective, imitation_loss
from etude.trainer.learner.phase import PhaseManager, PhaseState
from etude.trainer.learner.rows import TrainingRow
from etude.trainer.learner.sequence_packing import Microbatch, Packing
from etude.trainer.memory_plan.allocations import Allocations, Kind, Peak
from etude.trainer.model.activation_checkpointing import Checkpointing, checkpoint_blocks
from etude.trainer.model.compute_device import plan_gpu
from etude.trainer.model.fsdp import RankGroup, group_ranks
from etude.trainer.model.logit_probe import find_logit_transform
from etude.trainer.model.mesh import MeshShape
from etude.trainer.model.output_head import TokenScores
from etude.trainer.model.policy import InvalidModelError, Policy, read_config
from etude.trainer.model.sharded_load import allocate, build_blank_model

_MICROBATCHES = 2
"""The backward pass of the second one finds the gradients of the first in memory."""

_OFFLOADED = (Kind.WEIGHTS, Kind.GRADIENTS, Kind.MOMENTS)
"""Kinds that are in the host's memory with CPU offload."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """All that the memory of a rank's step depends on, but the model."""

    phase: Phase
    """Its objective, optimiser and reference weights."""
    tokens: int
    """Of each microbatch: one sequence, all of its tokens trained."""
    packed: bool
    """True if sequences are packed and not padded."""
    on_gpu: bool
    shard: int = 1
    """Ranks that share one copy of the weights."""
    replicate: int = 1
    """Copies."""
    context: int = 1
    """Ranks of one copy that share the tokens of each row."""
    expert: int = 1
    """Ranks of one copy that divide the experts of each layer, which are chosen evenly."""
    checkpointing: Checkpointing = Checkpointing.NONE
    lora: Lora | None = None
    """Adapters that are trained instead of the weights."""
    offload: bool = False
    """True if weights, gradients and moments are in the host's memory."""

    @property
    def kinds_on_host(self) -> tuple[Kind, ...]:
        """Kinds that are in the host's memory and not in a GPU's."""
        if not self.on_gpu:
            return ()
        # One block at a time of those that are offloaded is copied to the GPU.
        return (Kind.CHECKPOINT, *(_OFFLOADED if self.offload else ()))


class UnplannableModelError(UserError):
    """A step of this model depends on values, which a plan does not have."""

    reason = "InvalidModel"

    def __init__(self, folder: Path, cause: Exception) -> None:
        super().__init__(
            Problem(
                reason=self.reason,
                what=f"its memory cannot be planned: {str(cause).splitlines()[0]}",
                where=f"model.uri ({folder})",
                fix="start with few tokens a pass, and raise microBatchTokens while it fits",
            )
        )


def plan_step(folder: Path, step: PlannedStep) -> Peak:
    """Find the most memory that a rank uses in a step, without using it.

    Args:
        folder: with the model's config.json; no weights are read.
        step: to plan.

    Raises:
        InvalidModelError: the folder holds no model that can be trained.
        UnplannableModelError: its step cannot be run without values.
    """
    config = read_config(folder)
    try:
        transform = find_logit_transform(config)
    except ValueError as cause:
        raise InvalidModelError(folder, str(cause)) from cause
    with ExitStack() as stack:
        ranks = stack.enter_context(_join_fake_ranks(step))
        if step.on_gpu:
            stack.enter_context(plan_gpu())
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        model = build_blank_model(config).eval()
        policy = Policy(model, transform, ranks.context, step.lora)
        with unset_fake_temporarily():
            ranks.shard(policy)  # the mesh of divided experts is put together from values
        allocate(policy, ranks)
        checkpoint_blocks(policy.model, step.checkpointing)
        try:
            return _run_step(policy, ranks, step)
        except (
            DataDependentOutputException,
            DynamicOutputShapeException,
            UnsupportedOperatorException,
        ) as cause:
            raise UnplannableModelError(folder, cause) from cause


def _run_step(policy: Policy, ranks: RankGroup, step: PlannedStep) -> Peak:
    manager = PhaseManager(policy, ranks)
    state = manager.begin(step.phase, 0, under_way=None)
    # As after the first step: those of a new optimiser come with its first update.
    state.optimiser.reset_moments(updates=1)
    with Allocations() as allocations:
        copied = ShardMemory.allocate(manager.live_tensors(state))
        allocations.assign(Kind.CHECKPOINT, [copied.data])
        for module in (policy, state.reference):
            if module is not None:
                allocations.assign(Kind.WEIGHTS, module.parameters())
                allocations.assign(Kind.WEIGHTS, module.buffers())
        allocations.assign(Kind.MOMENTS, state.optimiser.moments().values())
        rows = [build_row(step.tokens)] * (_MICROBATCHES * ranks.num_shares)
        objective = _build_objective(state)
        guesses = add_guesses(objective, step.phase, rows)
        backward_rows(
            policy,
            rows,
            _record_forward(guesses or objective, allocations),
            ranks=ranks,
            packing=Packing(max_tokens=step.tokens, packed=step.packed),
            guesses=guesses is not None,
        )
        state.optimiser.gradient_norm()
        # Clipped: the norm has no value, and is taken as infinite.
        state.optimiser.apply_gradient(norm=float("inf"), rate=state.optimiser.rate_at(0))
        gradients = [p.grad for p in policy.parameters() if p.grad is not None]
        allocations.assign(Kind.GRADIENTS, gradients)
    return allocations.peak(without=step.kinds_on_host)


def _build_objective(state: PhaseState) -> Objective:
    if state.algorithm is None:
        return imitation_loss
    reference = None if state.reference is None else reference_scorer(state.reference)
    return PolicyObjective(algorithm=state.algorithm, reference=reference)


def _record_forward(objective: Objective, allocations: Allocations) -> Objective:
    """An objective that ends the forward pass: what is in memory then is kept for the backward."""

    def loss(scores: TokenScores, microbatch: Microbatch) -> Tensor:
        allocations.assign_live(Kind.ACTIVATIONS)
        return objective(scores, microbatch)

    return loss


def build_row(tokens: int) -> TrainingRow:
    """A sequence whose tokens are all trained; the first has nothing to be predicted from."""
    places = np.arange(1, tokens)
    values = np.zeros(places.size, dtype=np.float32)
    return TrainingRow(
        token_ids=np.zeros(tokens, dtype=np.int32),
        places=places,
        weights=values,
        advantages=values,
        sampler_logprobs=values,
        is_current=np.zeros(places.size, dtype=np.bool_),
        proximal_logprobs=values,
        sequence_log_rho=values,
        sequence_log_ratio=values,
    )


@contextmanager
def _join_fake_ranks(step: PlannedStep) -> Iterator[RankGroup]:
    """Ranks of which only this one exists; their collectives do nothing."""
    size, device = step.shard * step.replicate, torch.device("cpu")
    if size == 1:
        yield RankGroup(rank=0, size=1, device=device)
        return
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        shape = MeshShape(step.replicate, step.context, step.expert)
        ranks = group_ranks(device, shape=shape, is_balanced=True)
        yield replace(ranks, offload=step.offload)
    finally:
        dist.destroy_process_group()
