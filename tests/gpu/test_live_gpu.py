"""Live words on a real GPU: the contract of host memory, and a commit that never waits half-way."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from etude.common.weights.coding.codecs.ids import Codec
from etude.common.weights.replicas.live_weights import identity_regions
from etude.common.weights.replicas.staged_file import StagedBlock
from etude.common.weights.tensors.changes import diff_words
from etude.common.weights.tensors.schema import Schema, TensorSpec
from etude.common.weights.tensors.tiles import tiling
from etude.common.weights.tensors.words import Words
from etude.inference.worker.device.live_weights import DeviceLiveWeights

CONTRACT = Path(__file__).parents[1] / "unit" / "inference" / "worker" / "test_live_contract.py"

if not torch.cuda.is_available():
    if os.environ.get("ETUDE_REQUIRE") == "gpu":
        pytest.fail("ETUDE_REQUIRE=gpu, and CUDA has no device", pytrace=False)
    pytest.skip("no GPU", allow_module_level=True)

SCHEMA = Schema(
    grid=1,
    tensors=tuple(
        TensorSpec(name=f"layer{n:02d}", dtype="BF16", shape=(2048, 1024), split="rows")
        for n in range(24)
    ),
)


def test_the_contract_of_live_words_holds_on_the_gpu() -> None:
    command = (sys.executable, "-m", "pytest", "-q", "--noconftest", str(CONTRACT))
    env = os.environ | {"ETUDE_TEST_DEVICE": "cuda"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr


def blocks(old: Words, new: Words) -> list[StagedBlock]:
    """The same changes in every tensor, tile by tile: rows are whole, so tiles are ranges."""
    found = []
    how = tiling(SCHEMA.tensors[0], SCHEMA.grid)
    for tensor in range(len(SCHEMA.tensors)):
        start = 0
        for number in range(how.tiles):
            stop = start + how.tile(number).elements
            by = diff_words(old[start:stop], new[start:stop], ordered=True)
            found.append(StagedBlock(tensor, number, 0, stop - start, Codec.L1, *by))
            start = stop
    return found


def test_a_commit_waits_for_the_device_once_and_undo_too() -> None:
    rng = np.random.default_rng(1)
    size = SCHEMA.tensors[0].elements
    old = rng.integers(0, 1 << 16, size, np.uint16)
    new = old + (rng.random(size) < 0.01).astype(np.uint16)
    memory = {
        spec.name: torch.from_numpy(old.view(np.int16).copy()).cuda() for spec in SCHEMA.tensors
    }
    live = DeviceLiveWeights(SCHEMA, memory, identity_regions(SCHEMA))
    prepared = live.prepare(blocks(old, new))
    assert live.write(prepared)  # compiles
    assert live.undo(prepared)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            live.write(prepared)
        # Everything was launched before that one wait.
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    for flat in memory.values():
        assert np.array_equal(flat.cpu().numpy().view(np.uint16), new)
    assert live.undo(prepared)
    for flat in memory.values():
        assert np.array_equal(flat.cpu().numpy().view(np.uint16), old)


def test_preparing_beside_forward_passes_changes_nothing_that_they_read() -> None:
    rng = np.random.default_rng(2)
    size = SCHEMA.tensors[0].elements
    old = rng.integers(0, 1 << 16, size, np.uint16)
    new = old + (rng.random(size) < 0.01).astype(np.uint16)
    memory = {
        spec.name: torch.from_numpy(old.view(np.int16).copy()).cuda() for spec in SCHEMA.tensors
    }
    live = DeviceLiveWeights(SCHEMA, memory, identity_regions(SCHEMA))
    before = live.scan()
    matrix = torch.randn(4096, 4096, device="cuda")
    for _ in range(20):
        matrix = (matrix @ matrix).tanh()
    prepared = live.prepare(blocks(old, new))
    assert live.scan() == before
    assert live.write(prepared)
    assert live.scan() == before.plus(prepared.digest)
