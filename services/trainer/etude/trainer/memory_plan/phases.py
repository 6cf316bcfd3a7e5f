"""Memory of a learner rank in each phase of a run, and the changes that would lower it."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import PretrainedConfig

from etude.common.api.run.phases import Phase, inherit_context
from etude.common.api.run.roles import TrainerRole
from etude.common.api.run.spec import DEFAULT_ROLLOUT, RLRunSpec
from etude.trainer.learner.sequence_packing import uses_packing
from etude.trainer.memory_plan.allocations import Peak
from etude.trainer.memory_plan.step import PlannedStep, plan_step
from etude.trainer.model.activation_checkpointing import Checkpointing
from etude.trainer.model.context_parallel import check_context
from etude.trainer.model.policy import read_config


class Change(NamedTuple):
    """A change of the manifest, and the memory of a rank with it."""

    field: str
    """The field with its value, as it is written."""
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
    for phase in inherit_context(spec.phases):
        step = describe_step(spec.roles.trainer, phase, config)
        peak = plan_step(folder, step)
        changes = []
        if peak.num_bytes > limit_bytes:
            planned = (Change(text, plan_step(folder, each)) for text, each in _vary(step, config))
            changes = [change for change in planned if change.peak.num_bytes < peak.num_bytes]
        changes.sort(key=lambda change: change.peak.num_bytes)
        yield PhaseMemory(phase.name, step, peak, tuple(changes))


def describe_step(trainer: TrainerRole, phase: Phase, config: PretrainedConfig) -> PlannedStep:
    """The largest step of a phase.

    Raises:
        InvalidFieldError: the model does not allow the packing that is asked for.
    """
    mesh = trainer.mesh
    device = torch.device("cuda" if trainer.has_gpus else "cpu")
    replicate, context = (1, 1) if mesh is None else (mesh.replicate, mesh.context)
    tokens = max(trainer.micro_batch_tokens, longest_sequence(phase, config))
    return PlannedStep(
        phase=phase,
        # A sequence above the limit of a pass is a pass of its own; ranks share it evenly.
        tokens=-(-tokens // context) * context,
        packed=uses_packing(trainer.packing, config, context=context, device=device),
        on_gpu=trainer.has_gpus,
        shard=trainer.learner_ranks // replicate,
        replicate=replicate,
        context=context,
        checkpointing=Checkpointing(trainer.activation_checkpointing),
        offload=trainer.cpu_offload,
        lora=trainer.lora,
    )


def longest_sequence(phase: Phase, config: PretrainedConfig) -> int:
    """Tokens of the longest sequence of a phase; 0 where its data alone says it."""
    if phase.is_rl:
        return (phase.rollout or DEFAULT_ROLLOUT).max_tokens
    if phase.batch_tokens is None:
        return 0
    extension = phase.context_extension
    context: int = (
        config.get_text_config().max_position_embeddings
        if extension is None
        else extension.positions
    )
    return phase.sequence_tokens or min(context, phase.batch_tokens)


def _vary(step: PlannedStep, config: PretrainedConfig) -> Iterator[tuple[str, PlannedStep]]:
    """Steps with one field changed."""
    phase = step.phase
    if step.checkpointing != Checkpointing.BLOCKS:
        yield (
            "roles.trainer.activationCheckpointing: Blocks",
            dataclasses.replace(step, checkpointing=Checkpointing.BLOCKS),
        )
    if phase.optimizer.moments == "Float32":
        optimizer = phase.optimizer.model_copy(update={"moments": "BFloat16"})
        yield (
            f"phases[{phase.name}].optimizer.moments: BFloat16",
            dataclasses.replace(step, phase=phase.model_copy(update={"optimizer": optimizer})),
        )
    longest = longest_sequence(phase, config)
    if 0 < longest < step.tokens:
        yield (
            f"roles.trainer.microBatchTokens: {longest}",
            dataclasses.replace(step, tokens=longest),
        )
    is_sharded = step.on_gpu and step.shard * step.replicate > 1
    if is_sharded and not step.offload and step.lora is None:
        yield "roles.trainer.cpuOffload: true", dataclasses.replace(step, offload=True)
    if step.replicate > 1:
        ranks = step.shard * step.replicate
        yield (
            f"roles.trainer.mesh: {{shard: {ranks // step.context}, context: {step.context}}}",
            dataclasses.replace(step, shard=ranks, replicate=1),
        )
    context = 2 * step.context
    if step.packed and step.shard % context == 0 and _can_share_rows(config, context):
        yield (
            f"roles.trainer.mesh: {{shard: {step.shard // context}, replicate: {step.replicate},"
            f" context: {context}}}",
            dataclasses.replace(step, context=context, tokens=-(-step.tokens // context) * context),
        )
    ranks = 2 * step.shard * step.replicate
    yield (
        f"roles.trainer.learnerRanks: {ranks}",
        dataclasses.replace(step, shard=2 * step.shard),
    )


def _can_share_rows(config: PretrainedConfig, context: int) -> bool:
    try:
        check_context(config, context)
    except ValueError:
        return False
    return True
