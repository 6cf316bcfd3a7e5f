"""Packed rows: scores and gradients of sequences that share a row."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    Gemma2Config,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from etude.common.errors import WrongStateError
from etude.trainer.learner.gradients import accumulate_gradients
from etude.trainer.learner.objective import imitation_loss
from etude.trainer.learner.rows import TrainingRow
from etude.trainer.learner.sequence_packing import Packing, collate
from etude.trainer.model import packed_attention
from etude.trainer.model.flops import sequence_cost
from etude.trainer.model.fsdp import RankGroup
from etude.trainer.model.packed_attention import check_packing
from etude.trainer.model.policy import Policy, load_policy

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def rows(*lengths: int, seed: int = 0) -> list[TrainingRow]:
    rng = np.random.default_rng(seed)
    made = []
    for length in lengths:
        places = np.flatnonzero(rng.random(length - 1) < 0.7) + 1
        made.append(
            TrainingRow(
                token_ids=rng.integers(0, 64, length).astype(np.int32),
                places=places,
                weights=rng.random(places.size, dtype=np.float32) * np.float32(0.02),
            )
        )
    return made


def gradients(policy: Policy, batch: list[TrainingRow], *, packed: bool) -> dict[str, Any]:
    accumulate_gradients(
        policy,
        batch,
        imitation_loss,
        ranks=RankGroup(rank=0, size=1, device=torch.device("cpu")),
        packing=Packing(max_tokens=60, cost=sequence_cost(policy.model), packed=packed),
    )
    return {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SMALL),
        Qwen3Config(**SMALL, use_sliding_window=True, **WINDOWS, max_window_layers=1),
        MistralConfig(**SMALL, sliding_window=4),
        Qwen3MoeConfig(**SMALL, **EXPERTS),
    ],
    ids=["full", "some sliding", "all sliding", "experts"],
)
def test_packed_and_padded_steps_have_the_same_gradient(
    config: PretrainedConfig, tmp_path: Path
) -> None:
    config.save_pretrained(tmp_path)
    batch = rows(17, 9, 40, 2, 25, 31)
    padded = gradients(load_policy(tmp_path, seed=1), batch, packed=False)
    packed = gradients(load_policy(tmp_path, seed=1), batch, packed=True)
    assert padded.keys() == packed.keys()
    for name, expected in padded.items():
        torch.testing.assert_close(packed[name], expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("config", [LlamaConfig(**SMALL), Qwen3Config(**SMALL)])
def test_the_kernel_gets_the_narrow_format_of_a_single_gpu(
    config: PretrainedConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.save_pretrained(tmp_path)
    policy = load_policy(tmp_path, seed=1)
    formats: list[torch.dtype] = []

    def attend(parts: tuple[Tensor, ...], *given: Any, **settings: Any) -> Tensor:
        formats.extend(part.dtype for part in parts)
        return attend_segments(parts, *given, **settings)

    attend_segments = packed_attention._attend_segments
    monkeypatch.setattr(packed_attention, "_attend_segments", attend)
    # Autocast of a GPU, on a CPU: the kernel takes 16-bit numbers alone.
    enter = torch.autocast

    def autocast(device_type: str, dtype: torch.dtype | None = None, **given: Any) -> Any:
        return enter(device_type, dtype) if dtype is not None else enter(device_type, **given)

    monkeypatch.setattr(torch, "autocast", autocast)
    batch = collate(rows(7, 9), device=torch.device("cpu"), packed=True)
    scores = policy(batch.token_ids, batch.rows, batch.places, batch.lengths)
    imitation_loss(scores, batch).backward()
    assert formats == [torch.bfloat16] * 3 * SMALL["num_hidden_layers"]
    formats = [p.grad.dtype for p in policy.parameters() if p.grad is not None]
    assert set(formats) == {torch.float32}


def test_capped_attention_is_that_of_the_architecture(tmp_path: Path) -> None:
    config = Gemma2Config(**SMALL, **WINDOWS, attn_logit_softcapping=1.0, query_pre_attn_scalar=8)
    config.save_pretrained(tmp_path)
    policy = load_policy(tmp_path, seed=1)
    policy.model.set_attn_implementation("eager")
    batch = collate(rows(23), device=torch.device("cpu"))
    expected = policy(batch.token_ids, batch.rows, batch.places).logprobs
    found = policy(batch.token_ids, batch.rows, batch.places, (23,)).logprobs
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_padded_rows_are_capped_as_packed_ones_are(tmp_path: Path) -> None:
    config = Gemma2Config(**SMALL, **WINDOWS, attn_logit_softcapping=1.0, query_pre_attn_scalar=8)
    config.save_pretrained(tmp_path)
    batch = collate(rows(23, 9), device=torch.device("cpu"))
    found, expected = (load_policy(tmp_path, seed=1) for _ in range(2))
    expected.model.set_attn_implementation("eager")
    logprobs = [
        each(batch.token_ids, batch.rows, batch.places).logprobs for each in (found, expected)
    ]
    torch.testing.assert_close(*logprobs, atol=1e-5, rtol=1e-5)


def test_no_token_sees_another_sequence_of_its_row(tmp_path: Path) -> None:
    LlamaConfig(**SMALL).save_pretrained(tmp_path)
    policy = load_policy(tmp_path, seed=1)
    first, second, other = rows(12, 15, 12)
    device = torch.device("cpu")
    scores = []
    for companion in (first, other):
        batch = collate([companion, second], device=device, packed=True)
        found = policy(batch.token_ids, batch.rows, batch.places, batch.lengths).logprobs
        scores.append(found[-second.places.size :])
    assert torch.equal(scores[0], scores[1])


def test_a_rank_without_sequences_takes_part_in_a_packed_pass(tmp_path: Path) -> None:
    LlamaConfig(**SMALL).save_pretrained(tmp_path)
    policy = load_policy(tmp_path, seed=1)
    batch = collate([], device=torch.device("cpu"), packed=True)
    scores = policy(batch.token_ids, batch.rows, batch.places, batch.lengths)
    imitation_loss(scores, batch).backward()
    assert scores.logprobs.shape == (0,)


def test_layers_that_cannot_attend_within_sequences_are_refused_by_type() -> None:
    with pytest.raises(ValueError, match="qwen3_next has layers of type linear_attention"):
        check_packing(Qwen3NextConfig())
    check_packing(LlamaConfig(**SMALL))


def test_a_layer_that_attends_on_its_own_is_noticed(tmp_path: Path) -> None:
    LlamaConfig(**SMALL).save_pretrained(tmp_path)
    policy = load_policy(tmp_path, seed=1)
    policy.model.model.layers[1].forward = lambda hidden_states, **_: hidden_states
    batch = collate(rows(5, 6), device=torch.device("cpu"), packed=True)
    with pytest.raises(WrongStateError, match="1 of 2 layers of LlamaForCausalLM"):
        policy(batch.token_ids, batch.rows, batch.places, batch.lengths)
