"""Operations of a step: from the model's shape, and counted while it runs."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from etude.trainer.model.flops import peak_operations, sequence_cost
from etude.trainer.model.policy import load_policy

SHAPE = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
}
DENSE = LlamaConfig(**SHAPE, tie_word_embeddings=False)
TIED = LlamaConfig(**SHAPE, tie_word_embeddings=True)
EXPERTS = Qwen3MoeConfig(
    **SHAPE, head_dim=16, moe_intermediate_size=32, num_experts=8, num_experts_per_tok=2
)


def counted(config: PretrainedConfig, folder: Path, length: int) -> int:
    """Operations of a forward and backward pass through all logits, by torch's own count."""
    config.save_pretrained(folder)
    policy = load_policy(folder, seed=0)
    # As products: torch counts no fused attention of CPUs.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        logits: Tensor = policy.model(input_ids=torch.arange(length)[None], use_cache=False).logits
        logits.sum().backward()
    return int(counter.get_total_flops())


@pytest.mark.parametrize("config", [DENSE, TIED], ids=["untied", "tied"])
def test_operations_are_those_that_torch_counts(config: PretrainedConfig, tmp_path: Path) -> None:
    config.save_pretrained(tmp_path)
    cost = sequence_cost(load_policy(tmp_path, seed=0).model)
    for length in (32, 64):
        # torch computes what the mask hides, too.
        expected = cost.linear * length + 2 * cost.quadratic * length * length
        assert counted(config, tmp_path, length) == expected


def test_operations_of_a_dense_model_by_hand() -> None:
    """Llama of three layers: products with parameters, and causal attention."""
    block = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 96
    with torch.device("meta"):
        cost = sequence_cost(LlamaForCausalLM(DENSE))
    assert cost.linear == 6 * (3 * block + 256 * 64)
    # 3 passes, 3 layers, 4 heads of 16: 2 * 2 * l * l * 16, half of it under the mask.
    assert cost.quadratic == 3 * 3 * 4 * 2 * 16


def test_a_token_takes_its_own_experts_only() -> None:
    with torch.device("meta"):
        cost = sequence_cost(Qwen3MoeForCausalLM(EXPERTS))
    experts = 3 * 3 * 64 * 32 * 2
    router = 3 * 64 * 8
    attention = 3 * (64 * 64 * 2 + 64 * 32 * 2)
    assert cost.linear == 6 * (experts + router + attention + 256 * 64)


def test_latent_attention_has_keys_and_values_of_other_sizes() -> None:
    config = DeepseekV3Config(
        **SHAPE, qk_nope_head_dim=24, qk_rope_head_dim=8, v_head_dim=16, n_routed_experts=8
    )
    with torch.device("meta"):
        cost = sequence_cost(DeepseekV3ForCausalLM(config))
    # 3 passes, 3 layers, 4 heads: keys of 32 and values of 16.
    assert cost.quadratic == 3 * 3 * 4 * (32 + 16)


def test_a_cpu_has_no_peak_to_compare_with() -> None:
    assert peak_operations(torch.device("cpu")) is None
