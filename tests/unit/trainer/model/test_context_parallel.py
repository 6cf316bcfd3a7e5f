"""Ranks that share the tokens of a row compute the step of one rank."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.trainer.context_ranks import CASES, LAYERS, RANKS, compare_all
from tests.support.trainer.rank_processes import run_ranks
from transformers import LlamaConfig, Phi3Config, PretrainedConfig

from etude.common.api.storage import Storage
from etude.common.errors import InvalidFieldError
from etude.trainer.learner.config import LearnerConfig
from etude.trainer.learner.sequence_packing import build_packing
from etude.trainer.model.sharded_load import build_blank_model


@pytest.fixture(scope="module")
def comparisons(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    found: dict[str, dict[str, Any]] = run_ranks(compare_all, folder, size=RANKS)
    return found


@pytest.mark.parametrize("case", CASES)
def test_ranks_that_share_rows_make_the_step_of_one(
    comparisons: dict[str, dict[str, Any]], case: str
) -> None:
    differences = comparisons[case]
    assert differences["largest gradient"] > 0.01
    for figure in ("loss", "gradients", "recomputed", "logprobs", "frozen copy"):
        assert differences[figure] <= 1e-6, figure
    assert differences["other experts"] == 0


@pytest.mark.parametrize("case", CASES)
def test_a_layer_exchanges_tokens_for_heads_and_back_and_nothing_else(
    comparisons: dict[str, dict[str, Any]], case: str
) -> None:
    collectives = comparisons[case]["collectives"]
    assert collectives == {
        # Before and after attention, in the forward and in the backward pass.
        "c10d.alltoall_base_": 2 * 2 * LAYERS,
        # FSDP gathers and reduces each layer and the rest; the loss is a sum over ranks.
        "c10d._allgather_base_": 2 * LAYERS + 1,
        "c10d._reduce_scatter_base_": LAYERS + 1,
        "c10d.allreduce_": 1,
    }


def build(model: PretrainedConfig, **fields: Any) -> None:
    config = LearnerConfig(
        run="uid",
        holder="test",
        model_folder=Path("/nowhere"),
        storage=Storage(uri="file:///nowhere"),
        world_size=4,
        rendezvous="tcp://host:1",
        **fields,
    )
    build_packing(config, build_blank_model(model), device=torch.device("cpu"))


NINE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 36,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "num_hidden_layers": 1,
    "intermediate_size": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}


def test_heads_that_ranks_cannot_share_are_refused_by_field() -> None:
    with pytest.raises(InvalidFieldError, match=r"mesh\.context.*9 attention heads.*2 ranks"):
        build(LlamaConfig(**NINE), context=2)


def test_positions_that_depend_on_the_length_of_a_row_are_refused_by_field() -> None:
    dynamic = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
    eight = NINE | {"num_attention_heads": 8, "num_key_value_heads": 8, "hidden_size": 32}
    with pytest.raises(InvalidFieldError, match=r"mesh\.context.*RoPE of type dynamic"):
        build(LlamaConfig(**eight, rope_parameters=dynamic), context=2)
    factors = {"short_factor": [1.0, 1.0], "long_factor": [2.0, 2.0]}
    longrope = {"rope_type": "longrope", "rope_theta": 10_000.0, **factors}
    with pytest.raises(InvalidFieldError, match=r"mesh\.context.*RoPE of type longrope"):
        build(
            Phi3Config(**eight, rope_parameters=longrope, original_max_position_embeddings=32),
            context=2,
        )
