"""Memory of a learner rank in each phase of a run, and the changes that would lower it."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import PretrainedConfig

from etude.common.api.run.phases import Phase, inherit_context
from etude.common.api.run.roles import TrainerRole
from etude.common.api.run.spec import DEFAULT_ROLLOUT, RLRunSpec
from etude.common.errors import InvalidFieldError
from etude.trainer.learner.sequence_packing import uses_packing
from etude.trainer.memory_plan.allocations import Peak
from etude.trainer.memory_plan.proposals import Proposal, propose_changes
from etude.trainer.memory_plan.step import PlannedStep, plan_step
from etude.trainer.model.activation_checkpointing import Checkpointing
from etude.trainer.model.experts.expert_parallel import check_experts
from etude.trainer.model.mesh import ONE_COPY, MeshShape
from etude.trainer.model.policy import read_config


class Change(NamedTuple):
    """A change of the manifest, and the memory of a rank with it."""

    proposal: Proposal
    peak: Peak


class PhaseMemory(NamedTuple):
    """Memory of a rank in one phase."""

    phase: str
    step: PlannedStep
    peak: Peak
    changes: tuple[Change, ...]
    """That each lower the peak, the lowest first; none if it is low enough."""


def plan_phases(spec: RLRunSpec, folder: Path, *, limit_bytes: float) -> Iterator[PhaseMemory]:
    """Plan each phase of a run.

    Args:
        spec: of the run.
        folder: with the model's config.json.
        limit_bytes: of a rank; phases above it are planned with changes too.

    Raises:
        InvalidFieldError: the model does not allow the packing that is asked for.
        InvalidModelError: the folder holds no model that can be trained.
        UnplannableModelError: its step cannot be run without values.
    """
    config = read_config(folder)
    for index, phase in enumerate(inherit_context(spec.phases)):
        step = describe_step(spec.roles.trainer, phase, config)
        peak = plan_step(folder, step)
        changes: list[Change] = []
        if peak.num_bytes > limit_bytes:
            for proposal in propose_changes(spec, index, longest=longest_sequence(phase, config)):
                changed = _describe_change(proposal, index, config)
                if changed is not None:
                    changes.append(Change(proposal, plan_step(folder, changed)))
        lower = [change for change in changes if change.peak.num_bytes < peak.num_bytes]
        lower.sort(key=lambda change: change.peak.num_bytes)
        yield PhaseMemory(phase.name, step, peak, tuple(lower))


def _describe_change(
    proposal: Proposal, index: int, config: PretrainedConfig
) -> PlannedStep | None:
    """The step of a changed run; None if the model does not allow it."""
    phase = inherit_context(proposal.spec.phases)[index]
    try:
        return describe_step(proposal.spec.roles.trainer, phase, config)
    except InvalidFieldError:
        return None


def describe_step(trainer: TrainerRole, phase: Phase, config: PretrainedConfig) -> PlannedStep:
    """The largest step of a phase.

    Raises:
        InvalidFieldError: the model does not allow the packing or the mesh that is asked for.
    """
    mesh = trainer.mesh
    device = torch.device("cuda" if trainer.has_gpus else "cpu")
    shape = ONE_COPY
    if mesh is not None:
        shape = MeshShape(mesh.replicate, mesh.context, mesh.expert)
    check_experts(config, shape.expert)
    context = shape.context
    tokens = max(trainer.micro_batch_tokens, longest_sequence(phase, config))
    return PlannedStep(
        phase=phase,
        # A sequence above the limit of a pass is a pass of its own; ranks share it evenly.
        tokens=-(-tokens // context) * context,
        packed=uses_packing(trainer.packing, config, context=context, device=device),
        on_gpu=trainer.has_gpus,
        shard=trainer.learner_ranks // shape.replicate,
        replicate=shape.replicate,
        context=context,
        expert=shape.expert,
        checkpointing=Checkpointing(trainer.activation_checkpointing),
        offload=trainer.cpu_offload,
        lora=trainer.lora,
    )


def longest_sequence(phase: Phase, config: PretrainedConfig) -> int:
    """Tokens of the longest sequence of a phase; 0 where its data alone says it."""
    if phase.is_rl:
        return (phase.rollout or DEFAULT_ROLLOUT).context_tokens
    if phase.feedback is not None:
        return phase.feedback.max_tokens
    if phase.batch_tokens is None:
        return 0
    extension = phase.context_extension
    context: int = (
        config.get_text_config().max_position_embeddings
        if extension is None
        else extension.positions
    )
    return phase.sequence_tokens or min(context, phase.batch_tokens)
