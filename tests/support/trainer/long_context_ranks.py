"""One long row on two ranks that share its tokens, against one rank that has it whole."""

import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from tests.support.trainer.rank_processes import run_ranks
from torch import Tensor
from transformers import LlamaConfig

from etude.trainer.learner.gradients import accumulate_gradients
from etude.trainer.learner.objective import imitation_loss
from etude.trainer.learner.rows import TrainingRow
from etude.trainer.learner.sequence_packing import Packing
from etude.trainer.model.fsdp import RankGroup, join_ranks, leave_ranks
from etude.trainer.model.mesh import MeshShape
from etude.trainer.model.parameters import gather_full
from etude.trainer.model.policy import load_policy

RANKS = 2
WHOLE = "whole.pt"


class LongStep(NamedTuple):
    """A forward and a backward pass, measured on its first rank."""

    loss: float
    wall_s: float
    cpu_s: float
    more_bytes: int
    """Memory at its peak, above that before the pass."""
    largest_difference: float = 0.0
    """Of the gradient of any tensor from that of one rank, relative to its norm."""


class LongComparison(NamedTuple):
    """The same row on one rank and on two."""

    whole: LongStep
    shared: LongStep

    @property
    def loss_difference(self) -> float:
        """Relative difference of the losses."""
        return abs(self.shared.loss - self.whole.loss) / abs(self.whole.loss)


def compare_long_rows(folder: Path, *, tokens: int) -> LongComparison:
    """Train one row of so many tokens on one rank, then on two; each in processes of its own."""
    LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=48,
        max_position_embeddings=tokens,
        initializer_range=0.2,
    ).save_pretrained(folder)
    whole: LongStep = run_ranks(train_whole, folder, tokens, size=1)
    shared: LongStep = run_ranks(train_shared, folder, tokens, size=RANKS)
    return LongComparison(whole, shared)


def train_whole(rank: int, folder: Path, tokens: int) -> LongStep:
    """Compute the gradients of the whole row, and save them."""
    alone = RankGroup(rank=rank, size=1, device=torch.device("cpu"))
    step, gradients = _train(folder, alone, tokens)
    torch.save(gradients, folder / WHOLE)
    return step


def train_shared(rank: int, folder: Path, tokens: int) -> LongStep:
    """Compute the gradients of a row whose tokens two ranks share."""
    meeting = f"file://{folder}/meet"
    shape = MeshShape(context=RANKS)
    ranks = join_ranks(rank=rank, size=RANKS, rendezvous=meeting, shape=shape)
    step, gradients = _train(folder, ranks, tokens)
    leave_ranks(ranks)
    whole: dict[str, Tensor] = torch.load(folder / WHOLE)
    assert set(whole) == set(gradients)
    differences = [float((gradients[k] - g).norm() / g.norm()) for k, g in whole.items()]
    return step._replace(largest_difference=max(differences))


def _train(folder: Path, ranks: RankGroup, tokens: int) -> tuple[LongStep, dict[str, Tensor]]:
    policy = load_policy(folder, seed=1, ranks=ranks)
    before = _memory_bytes("VmRSS")
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    loss = accumulate_gradients(
        policy,
        [_row(tokens)],
        imitation_loss,
        ranks=ranks,
        packing=Packing(max_tokens=tokens, packed=True),
    )
    wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
    gradients = {
        name: gather_full(parameter.grad)
        for name, parameter in policy.named_parameters()
        if parameter.grad is not None
    }
    return LongStep(loss, wall_s, cpu_s, _memory_bytes("VmHWM") - before), gradients


def _row(tokens: int) -> TrainingRow:
    """A row of random tokens, of which the policy sampled every other stretch."""
    random = np.random.default_rng(0)
    places = np.flatnonzero(np.arange(tokens) // 512 % 2)
    return TrainingRow(
        token_ids=random.integers(0, 256, tokens).astype(np.int32),
        places=places,
        weights=np.full(places.size, 1 / places.size, dtype=np.float32),
    )


def _memory_bytes(name: str) -> int:
    """Memory of this process: VmRSS now, VmHWM at its peak, which leaves its parent out."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    (found,) = [line for line in lines if line.startswith(name)]
    return int(found.split()[1]) * 1024
