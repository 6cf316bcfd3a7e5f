"""Blocks that compute their activations again."""

import math
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


def exact_gradients(folder: Path, *, lengths: tuple[int, ...]) -> list[Tensor]:
    """Gradients of the same loss in float64, each sequence in a pass of its own."""
    model = build(folder, Checkpointing.NONE).model.double()
    ids = torch.arange(LENGTH)
    logits = torch.cat(
        [model(input_ids=part[None]).logits[0] for part in ids.split(lengths or LENGTH)]
    )
    (logits[:-1].log_softmax(-1).gather(1, ids[1:, None])).sum().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def distance(found: list[Tensor], exact: list[Tensor]) -> float:
    """Norm of the difference over the norm of the exact gradients."""
    pairs = zip(found, exact, strict=True)
    squares = sum(float((own.double() - true).square().sum()) for own, true in pairs)
    return math.sqrt(squares / sum(float(true.square().sum()) for true in exact))


@pytest.mark.long
@pytest.mark.parametrize("lengths", [(), (10, 14)], ids=["padded", "packed"])
@pytest.mark.parametrize("mode", [Checkpointing.NONE, Checkpointing.BLOCKS])
def test_compiled_blocks_give_gradients_as_exact_as_others(
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
    # Compiled kernels add in another order, which no fixed gap between the two allows for: elements
    # of up to 14 differ by 1.4e-5, and each is 1.9e-5 from float64.
    exact = exact_gradients(tmp_path, lengths=lengths)
    assert distance(expected, exact) < 1e-5
    assert distance(found, exact) < 2 * distance(expected, exact)
