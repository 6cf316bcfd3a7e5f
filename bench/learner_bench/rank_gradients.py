"""Gradients of four ranks over gloo against those of one rank.

Two copies of the weights, each over two ranks; and two groups of two ranks that share their rows'
tokens. The model has 8 heads, since two ranks cannot share SmolLM2-135M's 9.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from tests.support.trainer.rank_processes import run_ranks

from etude.trainer.learner.gradients import accumulate_gradients
from etude.trainer.learner.objective import imitation_loss
from etude.trainer.learner.sequence_packing import Packing
from etude.trainer.model.fsdp import RankGroup, join_ranks, leave_ranks
from etude.trainer.model.mesh import MeshShape
from etude.trainer.model.parameters import gather_full
from etude.trainer.model.policy import load_policy
from learner_bench.random_model import batch, build, gradient

RANKS = 4
HEADS, KEY_HEADS = 8, 2
PLAIN = "plain.npy"
FORMS = {"grad_diff_hsdp": {"replicas": 2}, "grad_diff_cp": {"context": 2}}


def compare_ranks(layers: int, tokens: int) -> dict[str, float]:
    """Largest difference of any gradient from that of one rank, for both forms."""
    with TemporaryDirectory() as name:
        policy = build(Path(name), layers, heads=HEADS, key_heads=KEY_HEADS)
        np.save(Path(name, PLAIN), gradient(policy, batch(tokens), packed=False).numpy())
        del policy
        differences: dict[str, float] = run_ranks(measure_forms, Path(name), tokens, size=RANKS)
        return differences


def _largest_difference(folder: Path, ranks: RankGroup, tokens: int) -> float:
    policy = load_policy(folder, seed=0, ranks=ranks)
    packing = Packing(max_tokens=tokens, packed=True)
    accumulate_gradients(policy, batch(tokens), imitation_loss, ranks=ranks, packing=packing)
    plain = torch.from_numpy(np.load(folder / PLAIN, mmap_mode="c"))
    largest, start = 0.0, 0
    for parameter in policy.parameters():
        if parameter.grad is None:
            continue
        full = gather_full(parameter.grad).flatten()
        expected = plain[start : start + full.numel()]
        largest = max(largest, float((full - expected).abs().max()))
        start += full.numel()
    if start != plain.numel():
        raise RuntimeError(f"{start} values of {plain.numel()} have gradients")
    return largest


def measure_forms(rank: int, folder: Path, tokens: int) -> dict[str, float]:
    """Largest difference of each form, on one of the ranks."""
    differences = {}
    for name, axes in FORMS.items():
        ranks = join_ranks(
            rank=rank,
            size=RANKS,
            rendezvous=f"file://{folder}/{name}",
            shape=MeshShape(axes.get("replicas", 1), axes.get("context", 1)),
        )
        differences[name] = _largest_difference(folder, ranks, tokens)
        leave_ranks(ranks)
    return differences
