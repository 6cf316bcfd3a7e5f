"""Mixtures of experts in the learner: plain gradients, and routers that replay recorded experts."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    PretrainedConfig,
    Qwen3MoeConfig,
)

from etude.common.errors import InvalidFieldError
from etude.trainer.learner.batches import (
    PolicySequence,
    SupervisedSequence,
    check_routes,
)
from etude.trainer.learner.gradients import accumulate_gradients, microbatch_losses
from etude.trainer.learner.objective import imitation_loss
from etude.trainer.learner.rows import TrainingRow, supervised_rows
from etude.trainer.learner.sequence_packing import Packing
from etude.trainer.model import activation_checkpointing
from etude.trainer.model.activation_checkpointing import Checkpointing
from etude.trainer.model.fsdp import RankGroup
from etude.trainer.model.parameters import parameters_by_name
from etude.trainer.model.policy import Policy, load_policy

ALONE = RankGroup(rank=0, size=1, device=torch.device("cpu"))
SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
QWEN = Qwen3MoeConfig(**SMALL, num_key_value_heads=1, head_dim=16, num_experts=4)
DEEPSEEK = DeepseekV3Config(
    **SMALL,
    num_key_value_heads=2,
    n_routed_experts=4,
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
FORMS = pytest.mark.parametrize(
    ("packed", "mode"),
    [(False, Checkpointing.NONE), (True, Checkpointing.BLOCKS)],
    ids=["padded", "packed and recomputed"],
)
Load = Callable[[PretrainedConfig], Policy]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    def make(config: PretrainedConfig) -> Policy:
        torch.set_num_threads(1)
        config.save_pretrained(tmp_path)
        return load_policy(tmp_path, seed=3)

    return make


def sequences() -> list[SupervisedSequence]:
    draw = np.random.default_rng(0)
    return [
        SupervisedSequence(
            token_ids=draw.integers(0, 64, size, dtype=np.int32),
            weights=np.ones(size, dtype=np.float32),
        )
        for size in (9, 5, 12)
    ]


def gradients(
    policy: Policy, rows: Sequence[TrainingRow], *, packed: bool
) -> tuple[float, dict[str, Tensor]]:
    packing = Packing(max_tokens=24, packed=packed)
    loss = accumulate_gradients(policy, rows, imitation_loss, ranks=ALONE, packing=packing)
    named = parameters_by_name(policy).items()
    return loss, {name: p.grad.clone() for name, p in named if p.grad is not None}


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        torch.testing.assert_close(gradient, theirs[name], rtol=1e-4, atol=1e-6, msg=name)


def live_routes(policy: Policy, row: TrainingRow) -> np.ndarray[Any, Any]:
    """Experts that the routers choose for a row, in transformers' own forward pass."""
    found: list[Tensor] = []
    hooks = [
        module.register_forward_hook(lambda _m, _a, result: found.append(result[2]))
        for module in policy.model.modules()
        if type(module).__name__.endswith(("TopKRouter", "TopkRouter"))
    ]
    with torch.no_grad():
        policy.model(input_ids=torch.from_numpy(row.token_ids.astype(np.int64))[None])
    for hook in hooks:
        hook.remove()
    return torch.stack(found, 1).numpy().astype(np.uint8)


def with_routes(rows: Sequence[TrainingRow], routes: Sequence[Any]) -> list[TrainingRow]:
    return [replace(row, routes=own) for row, own in zip(rows, routes, strict=True)]


@FAMILIES
@FORMS
def test_gradients_are_those_of_transformers(
    load: Load,
    config: PretrainedConfig,
    packed: bool,  # noqa: FBT001 - a parameter
    mode: Checkpointing,
) -> None:
    policy = load(config)
    plain: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    plain.load_state_dict(policy.model.state_dict())
    rows = supervised_rows(sequences())
    for row in rows:
        ids = torch.from_numpy(row.token_ids.astype(np.int64))
        scores = plain(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
        picked = scores[torch.arange(len(ids) - 1), ids[1:]]
        (-(picked * torch.from_numpy(row.weights))).sum().backward()
    expected = {f"model.{n}": p.grad for n, p in plain.named_parameters() if p.grad is not None}
    activation_checkpointing.checkpoint_blocks(policy.model, mode)
    _, found = gradients(policy, rows, packed=packed)
    assert_equal({n: found[n] for n in expected}, expected)


@FAMILIES
@FORMS
def test_replaying_the_live_routes_changes_no_gradient(
    load: Load,
    config: PretrainedConfig,
    packed: bool,  # noqa: FBT001 - a parameter
    mode: Checkpointing,
) -> None:
    policy = load(config)
    rows = supervised_rows(sequences())
    routes = [live_routes(policy, row) for row in rows]
    activation_checkpointing.checkpoint_blocks(policy.model, mode)
    loss, live = gradients(policy, rows, packed=packed)
    again, replayed = gradients(policy, with_routes(rows, routes), packed=packed)
    assert again == pytest.approx(loss, rel=1e-6)
    assert_equal(replayed, live)


@FAMILIES
@FORMS
def test_replayed_experts_are_those_that_compute(
    load: Load,
    config: PretrainedConfig,
    packed: bool,  # noqa: FBT001 - a parameter
    mode: Checkpointing,
) -> None:
    policy = load(config)
    activation_checkpointing.checkpoint_blocks(policy.model, mode)
    rows = supervised_rows(sequences())
    shape = policy.routers.shape
    assert shape is not None
    # Every token takes experts 0 and 1: the others have no gradient.
    routes = [np.tile(np.arange(2, dtype=np.uint8), (len(r.token_ids), shape[0], 1)) for r in rows]
    loss, found = gradients(policy, with_routes(rows, routes), packed=packed)
    experts = {n: g for n, g in found.items() if n.endswith(".experts.down_proj")}
    assert len(experts) == shape.layers
    for name, gradient in experts.items():
        assert gradient[:2].any(), name
        assert not gradient[2:].any(), name
    routers = [g for n, g in found.items() if n.endswith(".mlp.gate.weight")]
    assert all(gradient[:2].any() for gradient in routers)
    # Full plausibility is the live router, and so are rows without routes.
    live, _ = gradients(policy, rows, packed=packed)
    assert loss != pytest.approx(live, rel=1e-5)
    policy.routers.plausibility = 1.0
    plausible, _ = gradients(policy, with_routes(rows, routes), packed=packed)
    assert plausible == pytest.approx(live, rel=1e-6)


def test_tokens_without_recorded_experts_are_routed_live(load: Load) -> None:
    policy = load(QWEN)
    rows = supervised_rows(sequences())
    missing = [np.full((len(row.token_ids), 2, 2), 255, dtype=np.uint8) for row in rows]
    live, _ = gradients(policy, rows, packed=False)
    again, _ = gradients(policy, with_routes(rows, [missing[0], None, missing[2]]), packed=False)
    assert again == pytest.approx(live, rel=1e-6)


def test_the_next_rows_without_routes_are_routed_live(load: Load) -> None:
    policy = load(QWEN)
    rows = supervised_rows(sequences())
    routes = [np.tile(np.arange(2, dtype=np.uint8), (len(r.token_ids), 2, 1)) for r in rows]
    live, _ = gradients(policy, rows, packed=False)
    gradients(policy, with_routes(rows, routes), packed=False)
    [*_] = microbatch_losses(
        policy, rows, imitation_loss, ranks=ALONE, packing=Packing(max_tokens=24)
    )
    again, _ = gradients(policy, rows, packed=False)
    assert again == live


def sequence(shape: tuple[int, ...]) -> PolicySequence:
    return PolicySequence(
        token_ids=np.arange(4, dtype=np.int32),
        loss_mask=np.array([False, True, True, True]),
        sampler_logprobs=np.zeros(4, dtype=np.float32),
        rollout=0,
        routes=np.zeros(shape, dtype=np.uint8),
    )


@pytest.mark.parametrize("shape", [(3, 2, 2), (4, 2), (5, 2, 2)])
def test_routes_of_another_length_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidFieldError, match="routes"):
        sequence(shape)


def test_routes_of_another_model_are_refused_by_name() -> None:
    given = [sequence((4, 2, 2)), sequence((4, 3, 2))]
    check_routes(given[:1], (2, 2))
    with pytest.raises(InvalidFieldError, match=r"sequences\[1\]\.routes"):
        check_routes(given, (2, 2))
    with pytest.raises(InvalidFieldError, match=r"sequences\[0\]\.routes.*no routers"):
        check_routes(given, None)
