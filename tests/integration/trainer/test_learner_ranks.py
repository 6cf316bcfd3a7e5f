"""Two learner ranks that meet over gloo do what one does alone."""

import asyncio
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from etude.common.weights.tensors import safetensors

PROGRAM = Path(__file__).with_name("learner_rank.py")

Results = list[list[float]]


async def run(folder: Path, *, world_size: int) -> Results:
    ranks = [
        await asyncio.create_subprocess_exec(
            *(sys.executable, str(PROGRAM), str(rank), str(world_size), str(folder)),
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
    results: Results = json.loads(outputs[0][0])
    return results


@pytest.mark.long
async def test_two_ranks_make_the_same_update_as_one_and_read_each_others_checkpoints(
    tmp_path: Path,
) -> None:
    # One after the other: three processes that import torch at once would only be slower.
    together = await run(tmp_path, world_size=2)
    alone = await run(tmp_path, world_size=1)
    assert np.array(together) == pytest.approx(np.array(alone), abs=1e-6)
    one, two = (
        {
            tensor.name: np.frombuffer(bytes(tensor.data), np.float32)
            for tensor in safetensors.decode(file.read_bytes(), where=str(file))
        }
        for file in (tmp_path / f"export-{size}" / "model.safetensors" for size in (1, 2))
    )
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        # Six steps move a weight by up to 6e-4: Adam magnifies what rounds differently.
        assert two[name] == pytest.approx(tensor, abs=1e-6)
