"""Changes of a manifest that may lower the memory of a learner rank."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from pydantic import JsonValue, ValidationError

from etude.common.api.lint.messages import dotted
from etude.common.api.run.roles import LearnerMesh, TrainerRole
from etude.common.api.run.spec import RLRunSpec
from etude.common.api.yaml_documents import FieldPath

Fields = Mapping[FieldPath, JsonValue]
"""Values by their path below spec."""

_TRAINER = ("roles", "trainer")
_GPUS_OF_NODE = 8
"""More ranks than that are proposed as pods of several nodes."""


class Proposal(NamedTuple):
    """Fields to be set together."""

    fields: Fields
    spec: RLRunSpec
    """The run with them."""

    @property
    def text(self) -> str:
        """The fields as they are written, with their paths."""
        return ", ".join(
            f"{dotted(path)}: {_write_value(value)}" for path, value in self.fields.items()
        )


def propose_changes(spec: RLRunSpec, index: int, *, longest: int) -> Iterator[Proposal]:
    """Changes of a run that its rules allow; the model may still refuse one.

    Args:
        spec: of the run.
        index: of the phase whose memory is to be lower.
        longest: tokens of the phase's longest sequence; 0 if its data alone says it.
    """
    trainer = spec.roles.trainer
    proposed = (
        *_change_settings(index),
        *_shorten_passes(trainer, longest),
        *_change_mesh(trainer),
        _double_ranks(spec),
    )
    for fields in proposed:
        changed = _apply(spec, fields)
        if changed is not None and changed != spec:
            yield Proposal(fields, changed)


def _change_settings(index: int) -> Iterator[Fields]:
    yield {(*_TRAINER, "activationCheckpointing"): "Blocks"}
    yield {("phases", index, "optimizer", "moments"): "BFloat16"}
    yield {(*_TRAINER, "cpuOffload"): True}


def _shorten_passes(trainer: TrainerRole, longest: int) -> Iterator[Fields]:
    smallest = 64  # of the field
    if 0 < longest < trainer.micro_batch_tokens:
        yield {(*_TRAINER, "microBatchTokens"): max(smallest, longest)}


def _change_mesh(trainer: TrainerRole) -> Iterator[Fields]:
    """One copy instead of several, and twice as many ranks that share a row, or its experts."""
    mesh = trainer.mesh or LearnerMesh(shard=trainer.learner_ranks)
    ranks, copies = trainer.learner_ranks, mesh.replicate
    if copies > 1:
        yield _build_mesh(ranks // mesh.context, 1, mesh.context, mesh.expert)
    shard, rest = divmod(ranks, copies * 2 * mesh.context)
    if not rest:
        yield _build_mesh(shard, copies, 2 * mesh.context, mesh.expert)
    if not ranks // copies % (2 * mesh.expert):
        yield _build_mesh(mesh.shard, copies, mesh.context, 2 * mesh.expert)


def _double_ranks(spec: RLRunSpec) -> Fields:
    """Twice as many ranks for a copy of the weights, with GPUs for them."""
    trainer = spec.roles.trainer
    if not trainer.has_gpus:
        return {}  # they share the memory of one pod
    ranks, mesh = 2 * trainer.learner_ranks, trainer.mesh
    fields: dict[FieldPath, JsonValue] = {(*_TRAINER, "learnerRanks"): ranks}
    if mesh is not None:
        fields |= _build_mesh(2 * mesh.shard, mesh.replicate, mesh.context, mesh.expert)
    if trainer.gpus_per_replica and spec.scheduling.kind != "RayCluster":
        if ranks <= _GPUS_OF_NODE:
            fields[*_TRAINER, "gpusPerReplica"] = ranks
        else:
            fields["scheduling", "workload"] = "RayCluster"
    return fields


def _build_mesh(
    shard: int, replicate: int, context: int, expert: int
) -> dict[FieldPath, JsonValue]:
    sizes = {"shard": shard, "replicate": replicate, "context": context, "expert": expert}
    mesh: JsonValue = {name: n for name, n in sizes.items() if name == "shard" or n > 1}
    return {(*_TRAINER, "mesh"): mesh}


def _apply(spec: RLRunSpec, fields: Fields) -> RLRunSpec | None:
    """The run with other values; None if its rules refuse them."""
    changed = spec.model_dump(mode="json", by_alias=True, exclude_none=True)
    for path, value in fields.items():
        *above, name = path
        owner: Any = changed
        for part in above:
            owner = owner[part]
        owner[name] = value
    try:
        return RLRunSpec.model_validate(changed)
    except ValidationError:
        return None


def _write_value(value: JsonValue) -> str:
    """A value in YAML, on one line."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name}: {_write_value(each)}' for name, each in value.items())}}}"
    return str(value).lower() if isinstance(value, bool) else str(value)
