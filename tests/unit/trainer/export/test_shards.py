"""The parts that ranks publish make up the checkpoint once, whatever the mesh."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard, debug, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from etude.common.api.run.weights import Weights
from etude.common.weights.coding.codecs.ids import Codec
from etude.common.weights.tensors.digest import ZERO, Digest
from etude.common.weights.tensors.words import Words
from etude.trainer.export.receipts import sum_digests
from etude.trainer.export.shard_packer import ShardPacker
from etude.trainer.export.shards import published_runs
from etude.trainer.model import checkpoint_layout, tensor_bits
from etude.trainer.model.fsdp import RankGroup
from etude.trainer.model.policy import Policy, load_policy

SETTINGS = Weights.model_validate({"dtype": "Float32"})


@contextmanager
def rank_of(rank: int, size: int) -> Iterator[RankGroup]:
    """This process as one rank of a group without peers, for what needs no collective."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield RankGroup(rank=rank, size=size, device=torch.device("cpu"))
    finally:
        dist.destroy_process_group()
        debug._clear_sharding_prop_cache()


def spread(policy: Policy, mesh_shape: tuple[int, ...], placements: list[Placement]) -> Policy:
    """Spread all parameters; those with too few dimensions are replicated where they must be."""
    mesh = init_device_mesh("cpu", mesh_shape)
    for module in policy.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            fitting = [
                placement
                if not isinstance(placement, Shard) or placement.dim < parameter.ndim
                else Replicate()
                for placement in placements
            ]
            shard = distribute_tensor(parameter.detach(), mesh, fitting, src_data_rank=None)
            setattr(module, name, nn.Parameter(shard))
    return policy


@pytest.mark.parametrize(
    ("mesh_shape", "placements"),
    [
        ((3,), [Shard(0)]),
        ((2, 2), [Replicate(), Shard(0)]),
        ((2, 3), [Shard(0), Shard(0)]),
        ((2, 3), [Shard(1), Shard(0)]),
        ((2, 2), [Shard(2), Shard(1)]),
    ],
    ids=["uneven", "replicas", "two axes", "rows and columns", "experts"],
)
def test_the_parts_of_all_ranks_are_the_checkpoint(
    experts: Path, mesh_shape: tuple[int, ...], placements: list[Placement]
) -> None:
    whole = load_policy(experts, seed=0)
    expected = checkpoint_layout.to_checkpoint_tensors(
        whole.model, checkpoint_layout.live_tensors(whole.model)
    )
    found: dict[str, dict[int, Words]] = {name: {} for name in expected}
    digests: list[Digest] = []
    bounds: list[Digest] = []
    size = int(np.prod(mesh_shape))
    for rank in range(size):
        with rank_of(rank, size) as ranks:
            policy = spread(load_policy(experts, seed=0), mesh_shape, placements)
            packer = ShardPacker(policy, ranks, settings=SETTINGS)
            reader = packer._reader()
            for part in packer._parts:
                name = packer.schema.tensors[part.tensor].name
                assert part.start not in found[name]
                found[name][part.start] = reader.read_words(part)
            digests += packer.pack(None, {}, codec=Codec.L1).digests
            bounds.append(packer.coverage)
    for name, tensor in expected.items():
        words = np.concatenate([found[name][start] for start in sorted(found[name])])
        assert np.array_equal(words, tensor_bits.to_words(tensor, dtype=torch.float32))
    alone = RankGroup(rank=0, size=1, device=torch.device("cpu"))
    packed = ShardPacker(whole, alone, settings=SETTINGS).pack(None, {}, codec=Codec.L1)
    assert sum_digests(digests) == sum_digests(packed.digests)
    assert sum_digests(bounds) == ZERO
    # Each rank has something to add that no other one can replace.
    for rank, own in enumerate(bounds):
        if own != ZERO:
            assert sum_digests([*bounds[:rank], *bounds[rank + 1 :]]) != ZERO
            assert sum_digests([*bounds, own]) != ZERO


def test_a_sum_that_is_not_complete_is_refused_by_name() -> None:
    with rank_of(0, 2) as ranks:
        mesh = init_device_mesh("cpu", (2,))
        tensor = torch.distributed.tensor.DTensor.from_local(torch.zeros(4), mesh, [Partial()])
        with pytest.raises(ValueError, match=r"lm_head: a partial sum"):
            published_runs({"lm_head": tensor}, ranks)
