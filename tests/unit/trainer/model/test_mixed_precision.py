"""Sharded steps in bf16 with fp32 master weights."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from transformers import LlamaConfig

from etude.trainer.model import fsdp

RANK = """
import json, sys
from pathlib import Path
import torch
from etude.trainer.model import fsdp, packed_attention
from etude.trainer.model.policy import load_policy

attended = set()
attend_segments = packed_attention._attend_segments
def attend(parts, *given, **settings):
    attended.update(str(part.dtype) for part in parts)
    return attend_segments(parts, *given, **settings)
packed_attention._attend_segments = attend
folder = Path(sys.argv[1])
if sys.argv[2] == "bf16":
    # The formats of a GPU, on a CPU.
    formats = fsdp.mixed_precision(torch.device("cuda"))
    fsdp.mixed_precision = lambda device: formats
ranks = fsdp.join_ranks(rank=int(sys.argv[3]), size=2, rendezvous=f"file://{folder}/{sys.argv[2]}")
policy = load_policy(folder, seed=1, ranks=ranks)
ids, places = torch.arange(20)[None], torch.arange(1, 20)
scores = policy(ids, torch.zeros_like(places), places, (9, 11))
scores.logprobs[torch.arange(19) != 8].sum().backward()
grads = {n: p.grad.full_tensor() for n, p in policy.named_parameters()}
if ranks.is_first:
    formats = sorted({str(t.dtype) for p in policy.parameters() for t in (p, p.grad)})
    norms = {n: float(g.norm()) for n, g in grads.items()}
    print(json.dumps([sorted(attended), formats, scores.logprobs.tolist(), norms]))
fsdp.leave_ranks(ranks)
"""


class Found(NamedTuple):
    """Figures of rank 0."""

    attended: list[str]
    """Number formats of queries, keys and values."""
    formats: list[str]
    """Of parameters and gradients."""
    logprobs: list[float]
    norms: dict[str, float]


def run_ranks(folder: Path, precision: str) -> Found:
    children = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(folder), precision, str(rank)],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]
    outputs = [child.communicate(timeout=240)[0] for child in children]
    assert [child.returncode for child in children] == [0, 0]
    return Found(*json.loads(outputs[0].splitlines()[-1]))


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
    wide, narrow = run_ranks(tmp_path, "fp32"), run_ranks(tmp_path, "bf16")
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
