"""Shards of named tensors in one block of CPU memory, one after the other."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from etude.common.weights.tensors.safetensors import ITEM_BYTES
from etude.trainer.learner.checkpoint.index import StoredShard
from etude.trainer.model import tensor_bits
from etude.trainer.model.parameters import local_shard
from etude.trainer.model.shard_runs import intervals_of_shard

_ALIGNMENT = max(ITEM_BYTES.values())
"""Shards begin at multiples of it, so that elements of any format can be viewed there."""


class ShardMemory(NamedTuple):
    """This rank's shards of some tensors."""

    shards: tuple[StoredShard, ...]
    data: Tensor
    """Their bytes. [n]."""

    @classmethod
    def allocate(cls, tensors: Mapping[str, Tensor]) -> "ShardMemory":
        """Memory for the shards that this rank holds of the tensors; its content is arbitrary."""
        shards: list[StoredShard] = []
        size = 0
        for name, tensor in tensors.items():
            shard = StoredShard.model_validate(
                {
                    "name": name,
                    "dtype": tensor_bits.NAMES[tensor.dtype],
                    "shape": tuple(tensor.shape),
                    "intervals": tuple(
                        tuple(each for each in held if each[0] < each[1])
                        for held in intervals_of_shard(tensor)
                    ),
                    "offset": size,
                }
            )
            shards.append(shard)
            size += -(-shard.num_bytes // _ALIGNMENT) * _ALIGNMENT
        return cls(tuple(shards), torch.empty(size, dtype=torch.uint8))

    def view(self, shard: StoredShard) -> Tensor:
        """Elements of a shard, flat; shares the memory. [n]."""
        data = self.data[shard.offset : shard.offset + shard.num_bytes]
        return data.view(tensor_bits.DTYPES[shard.dtype])

    @torch.no_grad()
    def copy_from(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy the shards out of the tensors."""
        for shard in self.shards:
            self.view(shard).copy_(local_shard(tensors[shard.name]).reshape(-1))

    @torch.no_grad()
    def copy_to(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy the shards into the tensors."""
        for shard in self.shards:
            local = local_shard(tensors[shard.name])
            local.copy_(self.view(shard).reshape(local.shape))
