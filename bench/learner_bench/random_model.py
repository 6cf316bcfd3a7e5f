"""A random model of SmolLM2-135M's shape, a batch for it, and its gradient."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig

from etude.trainer.learner.gradients import accumulate_gradients
from etude.trainer.learner.objective import imitation_loss
from etude.trainer.learner.rows import TrainingRow
from etude.trainer.learner.sequence_packing import Packing
from etude.trainer.model.fsdp import RankGroup
from etude.trainer.model.policy import Policy, load_policy

VOCABULARY, HIDDEN = 49_152, 576


def build(folder: Path, layers: int, *, heads: int = 9, key_heads: int = 3) -> Policy:
    """A random policy of the shape of SmolLM2-135M."""
    LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        intermediate_size=1_536,
        max_position_embeddings=8_192,
        tie_word_embeddings=True,
    ).save_pretrained(folder)
    return load_policy(folder, seed=0)


def batch(tokens: int) -> list[TrainingRow]:
    """Sequences of unequal length with this many tokens in total."""
    rng = np.random.default_rng(0)
    lengths = [tokens // 2, tokens // 4, tokens // 8, tokens // 8]
    return [
        TrainingRow(
            token_ids=rng.integers(0, VOCABULARY, length).astype(np.int32),
            places=np.arange(1, length),
            weights=np.full(length - 1, 1 / tokens, np.float32),
        )
        for length in lengths
    ]


def gradient(policy: Policy, rows: list[TrainingRow], *, packed: bool) -> Tensor:
    """Gradient of the batch, flat."""
    alone = RankGroup(rank=0, size=1, device=torch.device("cpu"))
    packing = Packing(max_tokens=sum(row.token_ids.size for row in rows), packed=packed)
    accumulate_gradients(policy, rows, imitation_loss, ranks=alone, packing=packing)
    return torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])
