"""Device mesh of the learner ranks: the axes over which weights and tokens are spread."""

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from etude.trainer.model.context_parallel import UNDIVIDED, ContextGroup

REPLICATE = "replicate"
"""Axis of ranks that hold equal shards."""
SHARD = "shard"
"""Axis over which FSDP cuts every parameter; its ranks are consecutive, so on one host if they
fit."""
CONTEXT = "context"
"""Axis of consecutive ranks that share the tokens of each row; a part of the shard axis, so that
they share the weights too."""


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
