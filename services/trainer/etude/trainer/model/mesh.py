"""Device mesh of the learner ranks: the axes over which weights and tokens are spread."""

from typing import NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from etude.trainer.model.context_parallel import UNDIVIDED, ContextGroup
from etude.trainer.model.experts.expert_parallel import ALL_EXPERTS, ExpertGroup

REPLICATE = "replicate"
"""Axis of ranks that hold equal shards."""
SHARD = "shard"
"""Axis over which FSDP cuts every parameter; its ranks are consecutive, so on one host if they
fit."""
CONTEXT = "context"
"""Axis of consecutive ranks that share the tokens of each row; a part of the shard axis, so that
they share the weights too."""
EXPERT = "expert"
"""Axis of consecutive ranks that divide the experts of each layer; a part of the shard axis."""
EXPERT_SHARD = "expert_shard"
"""Axis over which FSDP cuts the experts of one place of the expert axis: the rest of the shard
axis."""


class MeshShape(NamedTuple):
    """Ranks along the axes; those of a copy that no axis names are its shares of the batch."""

    replicate: int = 1
    """Copies of the weights."""
    context: int = 1
    """Ranks of one copy that share the tokens of each row."""
    expert: int = 1
    """Ranks of one copy that divide the experts of each layer."""


ONE_COPY = MeshShape()
"""One copy, sharded over all ranks."""


def build_mesh(device_type: str, *, replicate: int, shard: int) -> DeviceMesh:
    """Build the mesh of all ranks; collective.

    Args:
        device_type: cpu or cuda.
        replicate: copies of the weights.
        shard: ranks that share one copy.
    """
    return init_device_mesh(device_type, (replicate, shard), mesh_dim_names=(REPLICATE, SHARD))


def sharding_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The axes that FSDP uses: one, or both if there is more than one copy (HSDP)."""
    return mesh if mesh[REPLICATE].size() > 1 else mesh[SHARD]


def build_context_group(device_type: str, *, size: int) -> ContextGroup:
    """Build the group of this rank and those that share its rows; collective.

    Args:
        device_type: cpu or cuda.
        size: ranks that share a row.
    """
    if size == 1:
        return UNDIVIDED
    shape = (dist.get_world_size() // size, size)
    axis = init_device_mesh(device_type, shape, mesh_dim_names=("data", CONTEXT))[CONTEXT]
    return ContextGroup(rank=axis.get_local_rank(), size=size, process_group=axis.get_group())


def build_expert_group(
    device_type: str, *, size: int, shape: MeshShape, is_balanced: bool = False
) -> ExpertGroup:
    """Build the group of this rank and those that divide experts with it; collective.

    Args:
        device_type: cpu or cuda.
        size: number of all ranks.
        shape: of the mesh.
        is_balanced: see the group's field.
    """
    if shape.expert == 1:
        return ALL_EXPERTS
    rest = size // shape.replicate // shape.expert
    # Of one root, as FSDP needs it for parameters that are divided already.
    mesh = init_device_mesh(
        device_type,
        (shape.replicate, rest, shape.expert),
        mesh_dim_names=(REPLICATE, EXPERT_SHARD, EXPERT),
    )
    # Else a norm over both axes would be added up along one after the other.
    mesh[EXPERT_SHARD, EXPERT]._flatten()
    shards = mesh[REPLICATE, EXPERT_SHARD] if shape.replicate > 1 else mesh[EXPERT_SHARD]
    return ExpertGroup(size=shape.expert, axis=mesh[EXPERT], shards=shards, is_balanced=is_balanced)
