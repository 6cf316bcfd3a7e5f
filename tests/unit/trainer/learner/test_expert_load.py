"""Load of experts: the tokens of each, against a plain count."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import DeepseekV3Config, PretrainedConfig, Qwen3MoeConfig

from etude.common.api.storage import Storage
from etude.trainer.controller.reporting.rows import RowPosition, step_row
from etude.trainer.learner.batches import PolicyBatch, PolicySequence, SupervisedSequence
from etude.trainer.learner.config import LearnerConfig
from etude.trainer.learner.gradients import accumulate_gradients
from etude.trainer.learner.learner import Learner
from etude.trainer.learner.objective import imitation_loss
from etude.trainer.learner.routes.load import ExpertLoad, load_figures
from etude.trainer.learner.rows import TrainingRow, supervised_rows
from etude.trainer.learner.sequence_packing import Packing
from etude.trainer.model import activation_checkpointing
from etude.trainer.model.activation_checkpointing import Checkpointing
from etude.trainer.model.fsdp import RankGroup
from etude.trainer.model.policy import Policy, load_policy

ALONE = RankGroup(rank=0, size=1, device=torch.device("cpu"))
EXPERTS, CHOICES = 4, 2
SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_experts_per_tok": CHOICES,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}
QWEN = Qwen3MoeConfig(**SMALL, num_key_value_heads=1, head_dim=16, num_experts=EXPERTS)
DEEPSEEK = DeepseekV3Config(
    **SMALL,
    num_key_value_heads=2,
    n_routed_experts=EXPERTS,
    n_shared_experts=1,
    n_group=2,
    topk_group=1,
    first_k_dense_replace=1,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_nope_head_dim=16,
    qk_rope_head_dim=16,
    v_head_dim=16,
)
FAMILIES = pytest.mark.parametrize("config", [QWEN, DEEPSEEK], ids=["qwen3", "deepseek"])
FIGURES = (
    "expert_load_ratio",
    "expert_load_ratio_worst",
    "expert_load_entropy",
    "expert_load_entropy_worst",
)
TEXTS = [np.random.default_rng(0).integers(0, 64, n).astype(np.int32) for n in (9, 5, 12, 20)]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def supervised() -> list[SupervisedSequence]:
    return [
        SupervisedSequence(token_ids=ids, weights=np.ones(ids.size, dtype=np.float32))
        for ids in TEXTS
    ]


def plain_count(policy: Policy) -> Tensor:
    """Tokens of each expert, text by text. [M, E]."""
    found: list[list[Tensor]] = []
    routers = [
        module
        for module in policy.model.modules()
        if type(module).__name__.endswith(("TopKRouter", "TopkRouter"))
    ]
    hooks = []
    for router in routers:
        found.append([])
        take = found[-1].append
        hooks.append(router.register_forward_hook(lambda _m, _a, r, take=take: take(r[2])))
    with torch.no_grad():
        for ids in TEXTS:
            policy.model(input_ids=torch.from_numpy(ids.astype(np.int64))[None])
    for hook in hooks:
        hook.remove()
    return torch.stack([torch.cat(layer).flatten().bincount(minlength=EXPERTS) for layer in found])


def count(policy: Policy, rows: Sequence[TrainingRow], *, packed: bool) -> Tensor:
    load = ExpertLoad(policy, ALONE)
    with load.counting(imitation_loss) as counted:
        packing = Packing(max_tokens=24, packed=packed)
        accumulate_gradients(policy, rows, counted, ranks=ALONE, packing=packing)
    return load.tokens()


@FAMILIES
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("mode", list(Checkpointing))
def test_each_token_is_counted_once_for_each_of_its_experts(
    tmp_path: Path,
    config: PretrainedConfig,
    packed: bool,  # noqa: FBT001 - a parameter
    mode: Checkpointing,
) -> None:
    config.save_pretrained(tmp_path)
    policy = load_policy(tmp_path, seed=3)
    expected = plain_count(policy)
    activation_checkpointing.checkpoint_blocks(policy.model, mode)
    found = count(policy, supervised_rows(supervised()), packed=packed)
    assert found.sum(-1).tolist() == [CHOICES * sum(ids.size for ids in TEXTS)] * len(found)
    assert (found == expected).all()


@FAMILIES
def test_replayed_experts_are_counted_and_not_those_of_the_live_routers(
    tmp_path: Path, config: PretrainedConfig
) -> None:
    config.save_pretrained(tmp_path)
    policy = load_policy(tmp_path, seed=3)
    assert policy.routers.shape is not None
    layers = policy.routers.shape.layers
    rows = [
        replace(row, routes=np.tile(np.array([1, 2], np.uint8), (row.token_ids.size, layers, 1)))
        for row in supervised_rows(supervised())
    ]
    tokens = sum(ids.size for ids in TEXTS)
    assert count(policy, rows, packed=True).tolist() == [[0, tokens, tokens, 0]] * layers


def test_figures_are_1_for_equal_loads_and_show_the_worst_layer() -> None:
    equal = load_figures(torch.tensor([[5, 5, 5, 5], [3, 3, 3, 3]]))
    assert [equal[name] for name in FIGURES] == pytest.approx([1.0] * 4)
    skewed = load_figures(torch.tensor([[5, 5, 5, 5], [20, 0, 0, 0], [10, 10, 0, 0]]))
    assert [skewed[name] for name in FIGURES] == pytest.approx([7 / 3, 4.0, 0.5, 0.0])
    assert load_figures(torch.zeros(2, 4, dtype=torch.int64)) == {}


def learner(folder: Path, config: PretrainedConfig) -> Learner:
    config.save_pretrained(folder / "model")
    return Learner(
        LearnerConfig(
            run="uid",
            holder="test",
            model_folder=folder / "model",
            storage=Storage(uri=f"file://{folder}/run"),
        )
    )


def test_steps_of_both_kinds_report_the_load_of_their_gradient_passes(tmp_path: Path) -> None:
    taught = learner(tmp_path, QWEN)
    expected = load_figures(plain_count(taught.policy))
    batch = PolicyBatch(
        sequences=tuple(
            PolicySequence(
                token_ids=ids,
                loss_mask=np.arange(ids.size) > 1,
                sampler_logprobs=np.full(ids.size, -4.2, dtype=np.float32),
                rollout=rollout,
            )
            for rollout, ids in enumerate(TEXTS)
        ),
        rewards=np.array([1.0, 0.0, 0.0, 1.0]),
        groups=np.array([0, 0, 1, 1]),
        valid=np.ones(4, dtype=np.bool_),
    )
    phase = {"name": "rl", "maxSteps": 5, "optimizer": {"learningRate": "1e-2"}}
    rl = {
        "type": "ReinforcementLearning",
        "tasks": [{"name": "train", "uri": "file:///tasks", "environment": "repos"}],
        # Neither the pass of the reference nor the one before the update counts.
        "algorithm": {"name": "GSPO", "parameters": {"klCoefficient": 0.1, "updatesPerBatch": 1}},
    }
    taught.start_phase(phase | rl, 0)
    reinforced = taught.policy_step(batch)
    assert {name: reinforced.extra[name] for name in FIGURES} == pytest.approx(expected)
    expected = load_figures(plain_count(taught.policy))
    data = [{"name": "traces", "uri": "file:///traces.jsonl"}]
    taught.start_phase(phase | {"name": "sft", "type": "SupervisedFineTuning", "data": data}, 0)
    imitated = taught.supervised_step(supervised())
    assert dict(imitated.extra) == pytest.approx(expected)
    place = RowPosition(time_s=0.0, phase="sft", step=1, global_step=2)
    row = step_row(place, imitated, seconds=1.0)
    assert [row[name] for name in FIGURES] == pytest.approx(
        [expected[name] for name in FIGURES], abs=1e-6
    )
