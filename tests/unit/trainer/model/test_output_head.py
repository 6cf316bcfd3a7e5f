"""Log-probs, entropies and gradients of the chunked output head."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GraniteConfig,
    LlamaConfig,
    PretrainedConfig,
)

from etude.trainer.model import logit_probe
from etude.trainer.model.logit_probe import find_logit_transform
from etude.trainer.model.output_head import LogitTransform, TokenScores, score_tokens
from etude.trainer.model.policy import InvalidModelError, load_policy

SMALL: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
    "initializer_range": 0.5,
}


def naive(
    hidden: Tensor, ids: Tensor, *, weight: Tensor, bias: Tensor | None, transform: LogitTransform
) -> TokenScores:
    every = transform.apply(nn.functional.linear(hidden, weight, bias)).log_softmax(dim=-1)
    logprobs = every.gather(1, ids[:, None])[:, 0]
    return TokenScores(logprobs, -(every.exp() * every).sum(dim=-1).detach())


def case(seed: int, *, num_tokens: int, dtype: torch.dtype, with_bias: bool) -> list[Tensor]:
    make = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_tokens, 12, generator=make).to(dtype).requires_grad_()
    weight = torch.randn(31, 12, generator=make).to(dtype).requires_grad_()
    bias = torch.randn(31, generator=make).to(dtype).requires_grad_()
    ids = torch.randint(0, 31, (num_tokens,), generator=make)
    return [ids, hidden, weight, *([bias] if with_bias else [])]


@settings(max_examples=40)
@given(
    seed=st.integers(0, 1_000),
    num_tokens=st.integers(0, 9),
    rows=st.integers(1, 10),
    factor=st.sampled_from([1.0, 0.0625, 3.0]),
    cap=st.sampled_from([None, 2.0, 30.0]),
    with_bias=st.booleans(),
)
def test_chunks_give_the_scores_and_gradients_of_all_logits(
    seed: int, num_tokens: int, rows: int, factor: float, cap: float | None, *, with_bias: bool
) -> None:
    transform = LogitTransform(factor, cap)
    ids, *inputs = case(seed, num_tokens=num_tokens, dtype=torch.float32, with_bias=with_bias)
    hidden, weight, bias = (*inputs, None)[:3]
    assert hidden is not None
    assert weight is not None
    expected = naive(hidden, ids, weight=weight, bias=bias, transform=transform)
    found = score_tokens(
        hidden, ids, weight=weight, bias=bias, transform=transform, chunk_logits=31 * rows
    )
    torch.testing.assert_close(found.logprobs, expected.logprobs, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(found.entropy, expected.entropy, atol=2e-6, rtol=1e-6)
    assert not found.entropy.requires_grad
    outer = torch.linspace(-1, 1, num_tokens)
    for ours, theirs in zip(
        torch.autograd.grad(found.logprobs, inputs, outer),
        torch.autograd.grad(expected.logprobs, inputs, outer),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


def test_one_chunk_gives_the_bits_of_torchs_own_operations() -> None:
    ids, hidden, weight = case(3, num_tokens=40, dtype=torch.float32, with_bias=False)
    expected = naive(hidden, ids, weight=weight, bias=None, transform=LogitTransform())
    found = score_tokens(hidden, ids, weight=weight)
    assert torch.equal(found.logprobs, expected.logprobs)
    assert torch.equal(found.entropy, expected.entropy)
    outer = torch.linspace(-1, 1, 40)
    ours = torch.autograd.grad(found.logprobs, (hidden, weight), outer)
    theirs = torch.autograd.grad(expected.logprobs, (hidden, weight), outer)
    assert all(map(torch.equal, ours, theirs))


def test_sums_of_bf16_inputs_are_in_fp32() -> None:
    ids, hidden, weight = case(5, num_tokens=20, dtype=torch.bfloat16, with_bias=False)
    found = score_tokens(hidden, ids, weight=weight, chunk_logits=31 * 6)
    wide_hidden, wide_weight = (t.detach().float().requires_grad_() for t in (hidden, weight))
    expected = naive(wide_hidden, ids, weight=wide_weight, bias=None, transform=LogitTransform())
    torch.testing.assert_close(found.logprobs, expected.logprobs, atol=1e-6, rtol=1e-6)
    found.logprobs.sum().backward()
    expected.logprobs.sum().backward()
    assert weight.grad is not None
    assert wide_weight.grad is not None
    torch.testing.assert_close(weight.grad, wide_weight.grad.bfloat16())


def test_no_more_logits_than_a_chunk_are_kept_for_the_backward_pass() -> None:
    sizes: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel())
        return tensor

    ids, hidden, weight = case(7, num_tokens=200, dtype=torch.float32, with_bias=False)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        score_tokens(hidden, ids, weight=weight, chunk_logits=31 * 16)
    assert max(sizes) == hidden.numel() < 200 * 31


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LlamaConfig(**SMALL), LogitTransform()),
        (Gemma2Config(**SMALL, final_logit_softcapping=3.0), LogitTransform(cap=3.0)),
        (CohereConfig(**SMALL, logit_scale=0.25), LogitTransform(0.25)),
        (GraniteConfig(**SMALL, logits_scaling=8.0), LogitTransform(0.125)),
    ],
)
def test_the_policy_scores_as_the_architecture_does(
    config: PretrainedConfig, expected: LogitTransform, tmp_path: Path
) -> None:
    config.save_pretrained(tmp_path)
    policy = load_policy(tmp_path, seed=1)
    assert policy.transform == expected
    ids = torch.arange(20)[None]
    places = torch.arange(1, 20)
    found = policy(ids, torch.zeros_like(places), places).logprobs
    logits = policy.model(input_ids=ids).logits[0, :-1]
    theirs = logits.log_softmax(dim=-1).gather(1, ids[0, 1:, None])[:, 0]
    torch.testing.assert_close(found, theirs, atol=1e-5, rtol=1e-5)


def test_an_unknown_change_of_logits_is_refused_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A model that caps its logits by a constant that no configuration field of the list has.
    monkeypatch.setattr(logit_probe, "_CAPS", ())
    Gemma2Config(**SMALL, final_logit_softcapping=3.0).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not read")
    with pytest.raises(InvalidModelError, match="gemma2 changes its logits after the output layer"):
        load_policy(tmp_path, seed=0)


def test_the_probe_leaves_the_random_numbers_alone() -> None:
    torch.manual_seed(4)
    before = torch.get_rng_state()
    find_logit_transform(LlamaConfig(**SMALL))
    assert torch.equal(torch.get_rng_state(), before)


def test_tied_embeddings_get_both_gradients(tmp_path: Path) -> None:
    LlamaConfig(**SMALL, tie_word_embeddings=True).save_pretrained(tmp_path)
    policy = load_policy(tmp_path, seed=2)
    ids, places = torch.arange(20)[None], torch.arange(1, 20)
    policy(ids, torch.zeros_like(places), places).logprobs.sum().backward()
    ours = policy.model.get_input_embeddings().weight.grad
    twin = AutoModelForCausalLM.from_config(policy.config, attn_implementation="sdpa").eval()
    twin.load_state_dict(policy.model.state_dict())
    logprobs = twin(input_ids=ids).logits[0, :-1].log_softmax(dim=-1)
    logprobs.gather(1, ids[0, 1:, None]).sum().backward()
    torch.testing.assert_close(ours, twin.get_input_embeddings().weight.grad, atol=1e-5, rtol=1e-5)
