"""Sharded steps in bf16 with fp32 master weights."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tests.support.trainer.rank_processes import run_ranks
from torch import Tensor
from transformers import LlamaConfig

from etude.trainer.model import fsdp, packed_attention
from etude.trainer.model.fsdp import RankGroup
from etude.trainer.model.parameters import gather_full
from etude.trainer.model.policy import load_policy


class Found(NamedTuple):
    """Figures of a pass in both directions."""

    attended: list[str]
    """Number formats of queries, keys and values."""
    formats: list[str]
    """Of parameters and gradients."""
    logprobs: list[float]
    norms: dict[str, float]


def run_both(rank: int, folder: Path) -> dict[str, Found]:
    """A pass in fp32, and one in the formats of a GPU, on a CPU."""
    ranks = fsdp.join_ranks(rank=rank, size=2, rendezvous=f"file://{folder}/meet")
    formats = fsdp.mixed_precision(torch.device("cuda"))
    wide = run_pass(ranks, folder)
    fsdp.mixed_precision = lambda device: formats  # ends with this process
    narrow = run_pass(ranks, folder)
    fsdp.leave_ranks(ranks)
    return {"fp32": wide, "bf16": narrow}


def run_pass(ranks: RankGroup, folder: Path) -> Found:
    attended: set[str] = set()
    attend_segments = packed_attention._attend_segments

    def attend(parts: tuple[Tensor, ...], *given: Any, **settings: Any) -> Any:
        attended.update(str(part.dtype) for part in parts)
        return attend_segments(parts, *given, **settings)

    policy = load_policy(folder, seed=1, ranks=ranks)
    ids, places = torch.arange(20)[None], torch.arange(1, 20)
    packed_attention._attend_segments = attend
    scores = policy(ids, torch.zeros_like(places), places, (9, 11))
    packed_attention._attend_segments = attend_segments
    scores.logprobs[torch.arange(19) != 8].sum().backward()
    formats = {str(t.dtype) for p in policy.parameters() for t in (p, p.grad) if t is not None}
    grads = {n: p.grad for n, p in policy.named_parameters() if p.grad is not None}
    norms = {name: float(gather_full(grad).norm()) for name, grad in grads.items()}
    return Found(sorted(attended), sorted(formats), scores.logprobs.tolist(), norms)


def test_masters_and_gradients_stay_fp32_while_blocks_compute_in_bf16(tmp_path: Path) -> None:
    LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        max_position_embeddings=64,
        initializer_range=0.1,
        tie_word_embeddings=False,
    ).save_pretrained(tmp_path)
    found: dict[str, Found] = run_ranks(run_both, tmp_path, size=2)
    wide, narrow = found["fp32"], found["bf16"]
    assert wide.formats == narrow.formats == ["torch.float32"]
    assert (wide.attended, narrow.attended) == (["torch.float32"], ["torch.bfloat16"])
    assert narrow.logprobs != wide.logprobs
    torch.testing.assert_close(
        torch.tensor(narrow.logprobs), torch.tensor(wide.logprobs), atol=0.05, rtol=0
    )
    assert narrow.norms.keys() == wide.norms.keys()
    for name, norm in wide.norms.items():
        assert narrow.norms[name] == pytest.approx(norm, rel=0.05)


def test_ranks_without_a_gpu_compute_in_fp32() -> None:
    assert fsdp.mixed_precision(torch.device("cpu")).param_dtype is None
