"""Device mesh of the learner ranks: the axes over which weights are spread."""

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

REPLICATE = "replicate"
"""Axis of ranks that hold equal shards."""
SHARD = "shard"
"""Axis over which FSDP cuts every parameter; its ranks are consecutive, so on one host if they
fit."""


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
