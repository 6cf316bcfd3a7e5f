"""Adapters: gradients of the plain formula, weights that stay merged, layers by name."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from transformers import Gemma2Config, LlamaConfig, PretrainedConfig, Qwen3Config, Qwen3MoeConfig
from typing_extensions import override

from etude.common.api.run.phases import Phase
from etude.common.api.run.roles import Lora
from etude.common.errors import UserError
from etude.trainer.learner.gradients import accumulate_gradients
from etude.trainer.learner.objective import imitation_loss
from etude.trainer.learner.optimiser import Optimiser
from etude.trainer.learner.rows import TrainingRow
from etude.trainer.learner.sequence_packing import Packing, collate
from etude.trainer.model.activation_checkpointing import Checkpointing, checkpoint_blocks
from etude.trainer.model.flops import sequence_cost
from etude.trainer.model.fsdp import RankGroup
from etude.trainer.model.lora import LoraAdapter, named_adapters
from etude.trainer.model.policy import Policy, copy_frozen, load_policy
from etude.trainer.model.shard_runs import placed_intervals

ALONE = RankGroup(rank=0, size=1, device=torch.device("cpu"))
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
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LORA = Lora(rank=4, alpha=12)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def build(folder: Path, config: PretrainedConfig, lora: Lora | None = LORA) -> Policy:
    """A policy whose adapters have learned something."""
    config.save_pretrained(folder)
    policy = load_policy(folder, seed=1, lora=lora)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for layer, adapter in named_adapters(policy.adapters):
            before = (adapter.lora_A.clone(), adapter.lora_B.clone())
            adapter.lora_B.copy_(torch.randn(adapter.lora_B.shape, generator=generator) * 0.02)
            adapter.add_change(policy.model.get_parameter(f"{layer}.weight"), before)
    return policy


def rows(*lengths: int, seed: int = 0) -> list[TrainingRow]:
    rng = np.random.default_rng(seed)
    return [
        TrainingRow(
            token_ids=rng.integers(0, 64, length).astype(np.int32),
            places=np.arange(1, length),
            weights=rng.random(length - 1, dtype=np.float32) * np.float32(0.02),
        )
        for length in lengths
    ]


def accumulate(policy: Policy, batch: list[TrainingRow], *, packed: bool = False) -> None:
    packing = Packing(max_tokens=60, cost=sequence_cost(policy.model), packed=packed)
    accumulate_gradients(policy, batch, imitation_loss, ranks=ALONE, packing=packing)


class PlainLora(nn.Module):
    """The formula of the paper on frozen weights, left to autograd."""

    def __init__(self, weight: Tensor, bias: Tensor | None, adapter: LoraAdapter) -> None:
        super().__init__()
        self.a = nn.Parameter(adapter.lora_A.detach().clone())
        self.b = nn.Parameter(adapter.lora_B.detach().clone())
        self.weight = weight.detach() - adapter.scale * (self.b @ self.a).detach()
        self.bias = None if bias is None else bias.detach()
        self.scale = adapter.scale

    @override
    def forward(self, inputs: Tensor) -> Tensor:
        frozen = nn.functional.linear(inputs, self.weight, self.bias)
        change: Tensor = self.scale * ((inputs @ self.a.t()) @ self.b.t())
        return frozen + change


def plain(policy: Policy, folder: Path) -> tuple[Policy, dict[str, PlainLora]]:
    """The same policy with modules of the plain formula."""
    other = load_policy(folder, seed=1)
    other.requires_grad_(requires_grad=False)
    made = {}
    for layer, adapter in named_adapters(policy.adapters):
        linear = policy.model.get_submodule(layer)
        assert isinstance(linear, nn.Linear)
        made[layer] = PlainLora(linear.weight, linear.bias, adapter)
        other.model.set_submodule(layer, made[layer])
    return other, made


@pytest.mark.parametrize("packing", ["Padded", "Packed"])
@pytest.mark.parametrize(
    "config",
    [LlamaConfig(**SMALL, mlp_bias=True), Qwen3Config(**SMALL), Gemma2Config(**SMALL)],
    ids=lambda config: config.model_type,
)
def test_gradients_and_scores_are_those_of_the_plain_formula(
    config: PretrainedConfig, packing: str, tmp_path: Path
) -> None:
    policy = build(tmp_path, config)
    oracle, modules = plain(policy, tmp_path)
    batch = rows(17, 9, 40, 2, 25)
    for each in (policy, oracle):
        accumulate(each, batch, packed=packing == "Packed")
    for layer, adapter in named_adapters(policy.adapters):
        for found, expected in (
            (adapter.lora_A, modules[layer].a),
            (adapter.lora_B, modules[layer].b),
        ):
            assert found.grad is not None
            torch.testing.assert_close(found.grad, expected.grad, atol=1e-6, rtol=1e-5)
            assert found.grad.abs().max() > 1e-4
    scored = collate(rows(30), device=torch.device("cpu"))
    one, other = (p(scored.token_ids, scored.rows, scored.places) for p in (policy, oracle))
    torch.testing.assert_close(one.logprobs, other.logprobs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("mode", [Checkpointing.BLOCKS, Checkpointing.SELECTIVE])
def test_blocks_that_compute_again_give_adapters_the_same_bits(
    mode: Checkpointing, tmp_path: Path
) -> None:
    found = []
    for each in (Checkpointing.NONE, mode):
        policy = build(tmp_path, LlamaConfig(**SMALL))
        checkpoint_blocks(policy.model, each)
        accumulate(policy, rows(20, 30))
        found.append([p.grad for p in policy.adapters.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def optimiser(policy: Policy) -> Optimiser:
    phase = {
        "name": "sft",
        "type": "SupervisedFineTuning",
        "maxSteps": 1_000,
        "optimizer": {"learningRate": "2e-3", "weightDecay": "0.05", "gradientClip": "1000"},
        "data": [{"name": "traces", "uri": "file:///traces.jsonl"}],
    }
    return Optimiser(policy, Phase.model_validate(phase))


def test_weights_stay_merged_over_many_steps_and_nothing_else_changes(tmp_path: Path) -> None:
    LlamaConfig(**SMALL).save_pretrained(tmp_path)
    policy = load_policy(tmp_path, seed=1, lora=LORA)
    before = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    trained = optimiser(policy)
    generator = torch.Generator().manual_seed(3)
    for step in range(200):
        for parameter in policy.adapters.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        trained.apply(step=step, loss=1.0)
    changed = set()
    for layer, adapter in named_adapters(policy.adapters):
        name = f"{layer}.weight"
        product = adapter.lora_B.double() @ adapter.lora_A.double()
        expected = before[name].double() + adapter.scale * product
        error = (policy.model.get_parameter(name).double() - expected).norm() / expected.norm()
        assert error < 1e-5
        # The adapter did change the weight, by much more than what is tolerated.
        assert (expected - before[name]).norm() / expected.norm() > 1e-2
        changed.add(name)
    for name, parameter in policy.model.named_parameters():
        assert torch.equal(parameter, before[name]) == (name not in changed)
    named = {name.removeprefix("exp_avg.").partition(".")[0] for name in trained.moments()}
    assert named <= {"adapters", "exp_avg_sq"}
    assert len(trained.moments()) == 4 * len(changed)


def test_a_new_adapter_changes_nothing_and_follows_from_the_seed(tmp_path: Path) -> None:
    LlamaConfig(**SMALL).save_pretrained(tmp_path)
    whole = load_policy(tmp_path, seed=1)
    policies = [load_policy(tmp_path, seed=1, lora=LORA) for _ in range(2)]
    for name, parameter in whole.model.named_parameters():
        assert torch.equal(parameter, policies[0].model.get_parameter(name))
    for one, other in zip(*(p.adapters.parameters() for p in policies), strict=True):
        assert torch.equal(one, other)
    for layer, adapter in named_adapters(policies[0].adapters):
        inputs = whole.model.get_parameter(f"{layer}.weight").shape[1]
        assert not adapter.lora_B.any()
        # Uniform in +-1 / sqrt(inputs).
        assert 0.8 < adapter.lora_A.abs().max() * inputs**0.5 <= 1


@torch.no_grad()
def test_an_earlier_policy_has_no_weights_of_its_own_and_scores_as_before(tmp_path: Path) -> None:
    policy = build(tmp_path, LlamaConfig(**SMALL))
    batch = collate(rows(30), device=torch.device("cpu"))
    expected = policy(batch.token_ids, batch.rows, batch.places).logprobs
    earlier = copy_frozen(policy, ALONE)
    for layer, adapter in named_adapters(policy.adapters):
        before = (adapter.lora_A.clone(), adapter.lora_B.clone())
        adapter.lora_A.mul_(1.5)
        adapter.lora_B.add_(0.02)
        adapter.add_change(policy.model.get_parameter(f"{layer}.weight"), before)
    now = policy(batch.token_ids, batch.rows, batch.places).logprobs
    assert (now - expected).abs().max() > 1e-1
    found = earlier(batch.token_ids, batch.rows, batch.places).logprobs
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(policy(batch.token_ids, batch.rows, batch.places).logprobs, now)
    named = dict(earlier.named_parameters())
    assert named.keys() == {f"adapters.{name}" for name, _ in policy.adapters.named_parameters()}
    assert not any(parameter.requires_grad for parameter in named.values())


MESHES = [
    ((2,), (Shard(0),)),
    ((3,), (Shard(0),)),
    ((2,), (Shard(1),)),
    ((2, 2), (Replicate(), Shard(0))),
    ((2, 2), (Shard(0), Shard(1))),
]


@given(st.integers(1, 9), st.integers(1, 9), st.sampled_from(MESHES), st.data())
@settings(max_examples=60, deadline=None)
def test_each_shard_gets_its_part_of_the_change(
    outputs: int, inputs: int, mesh: tuple[Any, Any], data: st.DataObject
) -> None:
    shape, placements = mesh
    coordinate = [data.draw(st.integers(0, size - 1)) for size in shape]
    torch.manual_seed(outputs * 10 + inputs)
    adapter = LoraAdapter(nn.Linear(inputs, outputs), Lora(rank=2, alpha=3))
    weight, before = torch.randn(outputs, inputs), (torch.randn(2, inputs), torch.randn(outputs, 2))
    nn.init.normal_(adapter.lora_A)
    nn.init.normal_(adapter.lora_B)
    change = 1.5 * (adapter.lora_B @ adapter.lora_A - before[1] @ before[0])
    rows_held, columns_held = placed_intervals((outputs, inputs), placements, shape, coordinate)
    kept = [
        [i for start, end in held for i in range(start, end)] for held in (rows_held, columns_held)
    ]
    shard = weight[kept[0]][:, kept[1]].clone()
    adapter.add_to_shard(shard, before, rows=rows_held, columns=columns_held)
    torch.testing.assert_close(shard, (weight + change)[kept[0]][:, kept[1]], atol=1e-5, rtol=1e-5)


def test_targets_are_ends_of_names(tmp_path: Path) -> None:
    lora = Lora(target_modules=("q_proj", "mlp.down_proj"))
    LlamaConfig(**SMALL).save_pretrained(tmp_path)
    policy = load_policy(tmp_path, seed=1, lora=lora)
    assert [layer for layer, _ in named_adapters(policy.adapters)] == [
        f"model.layers.{block}.{name}"
        for block in range(2)
        for name in ("mlp.down_proj", "self_attn.q_proj")
    ]


def test_a_target_that_is_no_layer_is_refused_with_those_that_are(tmp_path: Path) -> None:
    LlamaConfig(**SMALL).save_pretrained(tmp_path)
    with pytest.raises(UserError) as caught:
        load_policy(tmp_path, seed=1, lora=Lora(target_modules=("q_proj", "proj", "lm_head")))
    assert caught.value.problem.where == "roles.trainer.lora.targetModules"
    assert "LlamaForCausalLM has no linear layer proj, lm_head" in caught.value.problem.what
    assert (
        "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj" in caught.value.problem.fix
    )


def test_experts_are_not_left_out_silently(tmp_path: Path) -> None:
    Qwen3MoeConfig(**SMALL, **EXPERTS).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="experts of Qwen3MoeForCausalLM are no linear layers"):
        load_policy(tmp_path, seed=1, lora=LORA)
    attention = Lora(target_modules=("q_proj", "k_proj", "v_proj", "o_proj"))
    assert len(load_policy(tmp_path, seed=1, lora=attention).adapters) == 8


def test_frozen_weights_cost_no_third_pass(tmp_path: Path) -> None:
    LlamaConfig(**SMALL).save_pretrained(tmp_path)
    whole, frozen = (
        sequence_cost(load_policy(tmp_path, seed=1, lora=each).model) for each in (None, LORA)
    )
    assert frozen.linear == pytest.approx(whole.linear * 2 / 3)
    assert frozen.quadratic == whole.quadratic
