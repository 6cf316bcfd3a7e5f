"""Blocks that compute their activations again."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig
from typing_extensions import override

from etude.trainer.model.activation_checkpointing import (
    Checkpointing,
    checkpoint_blocks,
    compile_blocks,
)
from etude.trainer.model.policy import Policy, load_policy

LENGTH = 24


def build(folder: Path, mode: Checkpointing) -> Policy:
    LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=96,
        max_position_embeddings=64,
        initializer_range=0.2,
    ).save_pretrained(folder)
    policy = load_policy(folder, seed=1)
    checkpoint_blocks(policy.model, mode)
    return policy


def step(policy: Policy, *, lengths: tuple[int, ...]) -> tuple[list[Tensor], int]:
    """Gradients, and bytes that the forward pass keeps beside parameters."""
    ids, places = torch.arange(LENGTH)[None], torch.arange(1, LENGTH)
    own = {parameter.data_ptr() for parameter in policy.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in own:
            kept[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = policy(ids, torch.zeros_like(places), places, lengths).logprobs.sum()
    loss.backward()
    return [p.grad for p in policy.parameters() if p.grad is not None], sum(kept.values())


@pytest.mark.parametrize("lengths", [(), (10, 14)], ids=["padded", "packed"])
@pytest.mark.parametrize("mode", [Checkpointing.BLOCKS, Checkpointing.SELECTIVE])
def test_gradients_are_the_same_bits_and_less_is_kept(
    mode: Checkpointing, lengths: tuple[int, ...], tmp_path: Path
) -> None:
    expected, everything = step(build(tmp_path, Checkpointing.NONE), lengths=lengths)
    found, kept = step(build(tmp_path, mode), lengths=lengths)
    assert all(map(torch.equal, found, expected))
    assert kept < everything / 3


class AttentionCalls(TorchDispatchMode):
    """Counts the attention operations that are executed."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # The backward operation has another name.
        self.count += func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("mode", "executed"),
    [(Checkpointing.NONE, 3), (Checkpointing.BLOCKS, 6), (Checkpointing.SELECTIVE, 3)],
)
def test_a_selective_block_computes_no_attention_again(
    mode: Checkpointing, executed: int, tmp_path: Path
) -> None:
    policy = build(tmp_path, mode)
    with AttentionCalls() as calls:
        step(policy, lengths=())
    assert calls.count == executed


def test_a_pass_without_gradient_runs_blocks_as_they_are(tmp_path: Path) -> None:
    policy = build(tmp_path, Checkpointing.BLOCKS)
    ids, places = torch.arange(LENGTH)[None], torch.arange(1, LENGTH)
    with torch.no_grad():
        found = policy(ids, torch.zeros_like(places), places).logprobs
    expected: Any = build(tmp_path, Checkpointing.NONE)(ids, torch.zeros_like(places), places)
    assert torch.equal(found, expected.logprobs)


@pytest.mark.long
@pytest.mark.parametrize("lengths", [(), (10, 14)], ids=["padded", "packed"])
@pytest.mark.parametrize("mode", [Checkpointing.NONE, Checkpointing.BLOCKS])
def test_compiled_blocks_give_the_same_gradients(
    mode: Checkpointing, lengths: tuple[int, ...], tmp_path: Path
) -> None:
    torch._dynamo.reset()
    expected, _ = step(build(tmp_path, mode), lengths=lengths)
    compiled = build(tmp_path, mode)
    compile_blocks(compiled.model)
    # Once for a length that it compiles for, and once for another.
    step(compiled, lengths=())
    compiled.zero_grad()
    counters: Any = torch._dynamo.utils.counters
    found, _ = step(compiled, lengths=lengths)
    assert counters["stats"]["unique_graphs"] > 0
    for own, plain in zip(found, expected, strict=True):
        torch.testing.assert_close(own, plain, rtol=0, atol=1e-5)
