"""Several updates of a mixture of experts replay the experts of the pass before the first one."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3MoeConfig

from etude.common.api.storage import Storage
from etude.trainer.learner.batches import PolicyBatch, PolicySequence
from etude.trainer.learner.config import LearnerConfig
from etude.trainer.learner.learner import Learner

LENGTH, ROLLOUTS = 24, 4
CONFIG = Qwen3MoeConfig(
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    intermediate_size=64,
    moe_intermediate_size=32,
    num_experts=8,
    num_experts_per_tok=2,
    max_position_embeddings=64,
    tie_word_embeddings=False,
)


def batch() -> PolicyBatch:
    draw = np.random.default_rng(0)
    return PolicyBatch(
        sequences=tuple(
            PolicySequence(
                token_ids=draw.integers(0, 64, LENGTH).astype(np.int32),
                loss_mask=np.arange(LENGTH) > 4,
                sampler_logprobs=np.full(LENGTH, -4.2, dtype=np.float32),
                rollout=rollout,
            )
            for rollout in range(ROLLOUTS)
        ),
        rewards=np.array([1.0, 0.0, 0.0, 1.0]),
        groups=np.array([0, 0, 1, 1]),
        valid=np.ones(ROLLOUTS, dtype=np.bool_),
    )


def changed_choices(tmp_path: Path, replay: dict[str, Any] | None) -> int:
    """Choices of the second update that are not those of the pass before both."""
    torch.set_num_threads(1)
    CONFIG.save_pretrained(tmp_path / "model")
    learner = Learner(
        LearnerConfig(
            run="uid",
            holder="test",
            model_folder=tmp_path / "model",
            storage=Storage(uri=f"file://{tmp_path}/run"),
        )
    )
    learner.start_phase(
        {
            "name": "rl",
            "type": "ReinforcementLearning",
            "maxSteps": 50,
            "optimizer": {"learningRate": "5e-2"},
            "tasks": [{"name": "train", "uri": "file:///tasks", "environment": "repos"}],
            "algorithm": {"name": "DrGRPO", "parameters": {"updatesPerBatch": 2}},
            **({} if replay is None else {"routerReplay": replay}),
        },
        0,
    )
    passes: list[torch.Tensor] = []
    [router] = [m for n, m in learner.policy.named_modules() if n.endswith("layers.1.mlp.gate")]
    router.register_forward_hook(lambda _m, _a, result: passes.append(result[2].sort(-1).values))
    learner.policy_step(batch())
    *before, _, second = passes  # all rows; of the first group; of the second
    return int((torch.cat(before)[-len(second) :] != second).sum())


def test_the_second_update_takes_the_experts_of_the_pass_before_both(tmp_path: Path) -> None:
    assert changed_choices(tmp_path, None) > 0
    assert changed_choices(tmp_path, {"mode": "Recompute"}) == 0


def test_experts_that_became_implausible_are_not_replayed(tmp_path: Path) -> None:
    live = changed_choices(tmp_path, {"mode": "Off"})
    likely, any_share = (
        changed_choices(tmp_path, {"mode": "Recompute", "plausibility": share})
        for share in ("0.95", "0.3")
    )
    assert 0 <= any_share <= likely <= live
    assert likely > 0
