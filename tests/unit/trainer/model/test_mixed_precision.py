"""Sharded steps in bf16 with fp32 master weights."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from etude.trainer.model import fsdp

RANK = """
import json, sys
from pathlib import Path
import torch
from etude.trainer.model import fsdp
from etude.trainer.model.policy import load_policy

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
    print(json.dumps([formats, scores.logprobs.tolist(), norms]))
fsdp.leave_ranks(ranks)
"""


def run_ranks(folder: Path, precision: str) -> tuple[list[str], list[float], dict[str, float]]:
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
    formats, logprobs, norms = json.loads(outputs[0].splitlines()[-1])
    return formats, logprobs, norms


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
    formats, wide, wide_norms = run_ranks(tmp_path, "fp32")
    narrow_formats, narrow, narrow_norms = run_ranks(tmp_path, "bf16")
    assert formats == narrow_formats == ["torch.float32"]
    assert narrow != wide
    torch.testing.assert_close(torch.tensor(narrow), torch.tensor(wide), atol=0.05, rtol=0)
    assert narrow_norms.keys() == wide_norms.keys()
    for name, norm in wide_norms.items():
        assert narrow_norms[name] == pytest.approx(norm, rel=0.05)


def test_ranks_without_a_gpu_compute_in_fp32() -> None:
    assert fsdp.mixed_precision(torch.device("cpu")).param_dtype is None
