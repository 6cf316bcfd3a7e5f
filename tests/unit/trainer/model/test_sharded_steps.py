"""Steps of two ranks: what their collectives carry, and shards in the host's memory."""

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.trainer.collective_bytes import CollectiveBytes
from tests.support.trainer.rank_processes import run_ranks
from torch.distributed.fsdp import FSDPModule
from transformers import LlamaConfig

from etude.common.api.run.phases import Phase
from etude.trainer.learner.divergence import measure_divergence
from etude.trainer.learner.gradients import accumulate_gradients, microbatch_losses
from etude.trainer.learner.objective import imitation_loss
from etude.trainer.learner.phase import PhaseManager
from etude.trainer.learner.rows import TrainingRow
from etude.trainer.learner.sequence_packing import Packing
from etude.trainer.model import fsdp
from etude.trainer.model.fsdp import RankGroup
from etude.trainer.model.parameters import gather_full
from etude.trainer.model.policy import load_policy

PHASE = {
    "name": "sft",
    "type": "SupervisedFineTuning",
    "maxSteps": 2,
    "optimizer": {"learningRate": "1e-2", "gradientClip": "0.01"},
    "data": [{"name": "traces", "uri": "file:///traces.jsonl"}],
}
LAYERS, HIDDEN, VOCABULARY = 2, 32, 64


def run_steps(rank: int, folder: Path) -> dict[str, Any]:
    """Two steps with plain and with offloaded shards."""
    ranks = fsdp.join_ranks(rank=rank, size=2, rendezvous=f"file://{folder}/meet")
    plain = describe_steps(ranks, folder)
    offloaded = describe_steps(dataclasses.replace(ranks, offload=True), folder)
    divergence = diverge(ranks, folder)
    fsdp.leave_ranks(ranks)
    return {"plain": plain, "offloaded": offloaded, "divergence": divergence}


def diverge(ranks: RankGroup, folder: Path) -> float:
    """Divergence of the initial weights from a sampler that gave each token the same log-prob."""
    rows = [
        TrainingRow(
            token_ids=np.arange(length, dtype=np.int32),
            places=np.arange(1, length),
            weights=np.ones(length - 1, np.float32),
            advantages=np.ones(length - 1, np.float32),
            sampler_logprobs=np.full(length - 1, -4.0, np.float32),
            is_current=np.zeros(length - 1, np.bool_),
        )
        for length in (12, 20, 9, 7, 30)
    ]
    policy = load_policy(folder, seed=1, ranks=ranks)
    losses = partial(microbatch_losses, policy, ranks=ranks, packing=Packing(max_tokens=21))
    return measure_divergence(policy, rows, losses=losses, ranks=ranks, seed=0)


def describe_steps(ranks: RankGroup, folder: Path) -> dict[str, Any]:
    rows = [
        TrainingRow(
            token_ids=np.arange(length, dtype=np.int32),
            places=np.arange(1, length),
            weights=np.full(length - 1, 1 / 44, np.float32),
        )
        for length in (12, 20, 9, 7)
    ]
    policy = load_policy(folder, seed=1, ranks=ranks)
    state = PhaseManager(policy, ranks).begin(Phase.model_validate(PHASE), 0, under_way=None)
    losses, traffic = [], CollectiveBytes()
    for step in range(2):
        traffic = CollectiveBytes()
        with traffic:
            packing = Packing(max_tokens=21)
            loss = accumulate_gradients(policy, rows, imitation_loss, ranks=ranks, packing=packing)
            state.optimiser.apply(step=step, loss=loss)
        losses.append(loss)
    return {
        "losses": losses,
        "weights": {n: gather_full(p).tolist() for n, p in policy.named_parameters()},
        "calls": dict(traffic.calls),
        "bytes": dict(traffic.bytes),
        "units": [
            [parameter.offload_to_cpu for parameter in group.fsdp_params]
            for module in policy.modules()
            if isinstance(module, FSDPModule)
            and (group := module._get_fsdp_state()._fsdp_param_group) is not None
        ],
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's configuration."""
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
    return folder


@pytest.fixture(scope="module")
def report(folder: Path) -> dict[str, Any]:
    """Two steps of two ranks, with plain and with offloaded shards, as rank 0 saw them."""
    found: dict[str, Any] = run_ranks(run_steps, folder, size=2)
    return found


def test_ranks_measure_the_divergence_that_one_rank_measures(
    report: dict[str, Any], folder: Path
) -> None:
    alone = diverge(RankGroup(rank=0, size=1, device=torch.device("cpu")), folder)
    assert alone > 0.001
    assert report["divergence"] == pytest.approx(alone, rel=1e-5)


def test_a_step_of_offloaded_shards_gives_the_same_bits(report: dict[str, Any]) -> None:
    plain, offloaded = report["plain"], report["offloaded"]
    assert {each for unit in plain["units"] for each in unit} == {False}
    assert {each for unit in offloaded["units"] for each in unit} == {True}
    assert offloaded["losses"] == plain["losses"]
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
