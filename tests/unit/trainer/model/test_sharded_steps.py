"""Steps of two ranks: what their collectives carry, and shards in the host's memory."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

ROOT = Path(__file__).parents[4]
PHASE = {
    "name": "sft",
    "type": "SupervisedFineTuning",
    "maxSteps": 2,
    "optimizer": {"learningRate": "1e-2", "gradientClip": "0.01"},
    "data": [{"name": "traces", "uri": "file:///traces.jsonl"}],
}
RANK = """
import dataclasses, json, sys
from pathlib import Path
import numpy as np
from torch.distributed.fsdp import FSDPModule
from tests.support.trainer.collective_bytes import CollectiveBytes
from etude.common.api.run.phases import Phase
from etude.trainer.learner.gradients import accumulate_gradients
from etude.trainer.learner.objective import imitation_loss
from etude.trainer.learner.phase import PhaseManager
from etude.trainer.learner.rows import TrainingRow
from etude.trainer.learner.sequence_packing import Packing
from etude.trainer.model import fsdp
from etude.trainer.model.policy import load_policy

folder, phase = Path(sys.argv[1]), Phase.model_validate_json(sys.argv[2])
joined = fsdp.join_ranks(rank=int(sys.argv[3]), size=2, rendezvous=f"file://{folder}/meet")
rows = [
    TrainingRow(
        token_ids=np.arange(length, dtype=np.int32),
        places=np.arange(1, length),
        weights=np.full(length - 1, 1 / 44, np.float32),
    )
    for length in (12, 20, 9, 7)
]
report = {}
for offload in (False, True):
    ranks = dataclasses.replace(joined, offload=offload)
    policy = load_policy(folder, seed=1, ranks=ranks)
    state = PhaseManager(policy, ranks).begin(phase, 0, under_way=None)
    for step in range(2):
        with CollectiveBytes() as traffic:
            loss = accumulate_gradients(
                policy, rows, imitation_loss, ranks=ranks, packing=Packing(max_tokens=21)
            )
            state.optimiser.apply(step=step, loss=loss)
    units = [
        [p.offload_to_cpu for p in m._get_fsdp_state()._fsdp_param_group.fsdp_params]
        for m in policy.modules()
        if isinstance(m, FSDPModule)
    ]
    report["offloaded" if offload else "plain"] = {
        "loss": loss,
        "weights": {n: p.full_tensor().tolist() for n, p in policy.named_parameters()},
        "calls": traffic.calls,
        "bytes": traffic.bytes,
        "units": units,
    }
if joined.is_first:
    print(json.dumps(report))
fsdp.leave_ranks(joined)
"""
LAYERS, HIDDEN, VOCABULARY = 2, 32, 64


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two steps of two ranks, with plain and with offloaded shards, as rank 0 saw them."""
    folder = tmp_path_factory.mktemp("ranks")
    LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    ).save_pretrained(folder)
    children = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(folder), json.dumps(PHASE), str(rank)],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        )
        for rank in range(2)
    ]
    outputs = [child.communicate(timeout=500)[0] for child in children]
    assert [child.returncode for child in children] == [0, 0]
    found: dict[str, Any] = json.loads(outputs[0].splitlines()[-1])
    return found


def test_a_step_of_offloaded_shards_gives_the_same_bits(report: dict[str, Any]) -> None:
    plain, offloaded = report["plain"], report["offloaded"]
    assert {each for unit in plain["units"] for each in unit} == {False}
    assert {each for unit in offloaded["units"] for each in unit} == {True}
    assert offloaded["loss"] == plain["loss"]
    assert offloaded["weights"] == plain["weights"]


def test_collectives_carry_what_fsdp_needs_and_nothing_else(report: dict[str, Any]) -> None:
    block = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * HIDDEN // 2 + 3 * 48 * HIDDEN + 2 * HIDDEN
    root = 2 * VOCABULARY * HIDDEN + HIDDEN
    passes = 2
    found = report["plain"]
    # A block is gathered in each direction; the root is gathered once, and kept in between.
    assert found["bytes"]["allgather_base"] == 4 * passes * (2 * LAYERS * block + root)
    assert found["bytes"]["reduce_scatter_base"] == 4 * passes * (LAYERS * block + root)
    assert found["calls"]["allgather_base"] == passes * (2 * LAYERS + 1)
    assert found["calls"]["reduce_scatter_base"] == passes * (LAYERS + 1)
    # Beside them the loss, and the norm of each parameter's gradient.
    others = {
        name: size
        for name, size in found["bytes"].items()
        if name not in {"allgather_base", "reduce_scatter_base"}
    }
    assert others == {"allreduce": 8, "all_reduce": 4 * (9 * LAYERS + 3)}
