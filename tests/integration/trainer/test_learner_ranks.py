"""Two learner ranks that meet over gloo do what one does alone."""

import asyncio
import json
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from etude.common.weights.tensors import safetensors

FSDP = {"c10d._allgather_base_", "c10d._reduce_scatter_base_", "c10d.allreduce_"}
FIGURES = {"c10d.allgather_", "c10d.allreduce_", "c10d_functional.all_reduce"}
"""Sums of losses and norms, and log-probs of sampled tokens, of all ranks."""
LAYERS = 2
PROGRAM = Path(__file__).with_name("learner_rank.py")


class Found(NamedTuple):
    """What rank 0 reports."""

    results: list[list[float]]
    restored: str
    """Digest of the weights that two ranks saved and these ranks restored."""
    collectives: dict[str, int]


async def run(
    folder: Path, *, world_size: int, replicas: int = 1, context: int = 1, lora_rank: int = 0
) -> Found:
    settings = (world_size, folder, replicas, context, lora_rank)
    ranks = [
        await asyncio.create_subprocess_exec(
            *(sys.executable, str(PROGRAM), str(rank), *map(str, settings)),
            stdout=asyncio.subprocess.PIPE,
        )
        for rank in range(world_size)
    ]
    try:
        outputs = await asyncio.gather(*(rank.communicate() for rank in ranks))
    finally:
        for rank in ranks:
            if rank.returncode is None:
                rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * world_size
    return Found(**json.loads(outputs[0][0]))


def assert_only_fsdp_communicates(collectives: dict[str, int]) -> None:
    """Modules gather their own parameters and reduce their gradients; the rest are figures."""
    modules = collectives.pop("modules")
    assert collectives.keys() <= FSDP | FIGURES, "a complete tensor was gathered"
    # Forward and backward passes, and the forward pass of the reference.
    assert 0 < collectives["c10d._allgather_base_"] <= 3 * modules
    assert collectives["c10d._reduce_scatter_base_"] == modules
    # All figures in one exchange of objects: first their sizes, then they.
    assert collectives["c10d.allgather_"] == 2


@pytest.mark.long
async def test_ranks_make_the_same_update_as_one_and_read_each_others_checkpoints(
    tmp_path: Path,
) -> None:
    # One after the other: many processes that import torch at once would only be slower.
    together = await run(tmp_path, world_size=2)
    alone = await run(tmp_path, world_size=1)
    two_copies = await run(tmp_path, world_size=4, replicas=2)
    shared = await run(tmp_path, world_size=2, context=2)
    shared_by_shards = await run(tmp_path, world_size=4, context=2)
    others = (alone, two_copies, shared, shared_by_shards)
    assert {each.restored for each in others} == {together.restored}
    for found in (together, two_copies, shared, shared_by_shards):
        assert np.array(found.results) == pytest.approx(np.array(alone.results), abs=1e-6)
    for found in (together, two_copies):
        assert_only_fsdp_communicates(found.collectives)
    for found in (shared, shared_by_shards):
        exchanges = found.collectives.pop("c10d.alltoall_base_")
        passes = found.collectives["c10d._reduce_scatter_base_"] // found.collectives["modules"]
        # Before and after attention, forward and backward and in the reference's forward pass.
        assert exchanges == 2 * 3 * LAYERS * passes
    # Six steps move a weight by up to 6e-4: Adam magnifies what rounds differently.
    assert_equal_exports(tmp_path, "model.safetensors")


@pytest.mark.long
async def test_ranks_train_the_same_adapters_as_one_and_reduce_them_once(tmp_path: Path) -> None:
    together = await run(tmp_path, world_size=2, lora_rank=4)
    alone = await run(tmp_path, world_size=1, lora_rank=4)
    assert np.array(together.results) == pytest.approx(np.array(alone.results), abs=1e-6)
    assert together.collectives.keys() <= FSDP | FIGURES | {"modules"}
    # Frozen weights are gathered, and have no gradients.
    assert "c10d._reduce_scatter_base_" not in together.collectives
    for file in ("model.safetensors", "adapter_model.safetensors"):
        assert_equal_exports(tmp_path, file)


def assert_equal_exports(folder: Path, name: str) -> None:
    one, two = (
        {
            tensor.name: np.frombuffer(bytes(tensor.data), np.float32)
            for tensor in safetensors.decode(file.read_bytes(), where=str(file))
        }
        for file in (folder / f"export-{size}" / name for size in (1, 2))
    )
    assert one.keys() == two.keys()
    for key, tensor in one.items():
        assert two[key] == pytest.approx(tensor, abs=1e-6)
