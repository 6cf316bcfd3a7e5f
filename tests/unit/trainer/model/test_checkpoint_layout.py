"""Every element of the checkpoint has one place in the module, and is found there."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
)

from etude.trainer.model import tensor_bits
from etude.trainer.model.checkpoint_layout import (
    CheckpointLayout,
    live_tensors,
    to_checkpoint_tensors,
    trace_layout,
)

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
}
MOE: dict[str, Any] = {"moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2}


def model_of(config: PretrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model


def moved(model: PreTrainedModel, layout: CheckpointLayout) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors, put together by the pieces."""
    live = live_tensors(model)
    found = {spec.name: torch.full((spec.elements,), torch.nan) for spec in layout.schema.tensors}
    for source, pieces in layout.pieces.items():
        flat = live[source].reshape(-1)
        for piece in pieces:
            part = flat[piece.start : piece.start + piece.length]
            found[piece.tensor][piece.first : piece.first + piece.length] = part
    shapes = {spec.name: spec.shape for spec in layout.schema.tensors}
    return {name: value.reshape(shapes[name]) for name, value in found.items()}


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SMALL),
        Qwen3Config(**SMALL, tie_word_embeddings=True),
        Qwen3MoeConfig(**SMALL, **MOE),
        Qwen3MoeConfig(**{**SMALL, "num_hidden_layers": 12}, **MOE, tie_word_embeddings=True),
    ],
    ids=["llama", "tied", "experts", "many layers"],
)
def test_the_pieces_make_up_what_a_conversion_of_everything_gives(config: PretrainedConfig) -> None:
    model = model_of(config)
    layout = trace_layout(model, dtype="Float32", grid=8)
    assert layout.scattered == ()
    expected = to_checkpoint_tensors(model, live_tensors(model))
    found = moved(model, layout)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor)


def test_tied_weights_are_in_the_schema_once() -> None:
    names = trace_layout(
        model_of(Qwen3Config(**SMALL, tie_word_embeddings=True)), dtype="BFloat16", grid=8
    ).schema.index
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names


def test_floats_travel_in_the_format_of_the_run_and_are_cut_as_inference_cuts_them() -> None:
    layout = trace_layout(model_of(LlamaConfig(**SMALL)), dtype="BFloat16", grid=4)
    assert layout.schema.grid == 4
    assert {spec.dtype for spec in layout.schema.tensors} == {"BF16"}
    splits = {spec.name: spec.split for spec in layout.schema.tensors}
    assert splits["model.layers.0.self_attn.o_proj.weight"] == "columns"
    assert splits["model.layers.0.self_attn.q_proj.weight"] == "rows"


def test_a_layout_that_no_runs_describe_is_left_to_whole_tensors(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = model_of(Qwen3MoeConfig(**SMALL, **MOE))
    monkeypatch.setattr("etude.trainer.model.checkpoint_layout._covers_all", lambda *_: False)
    layout = trace_layout(model, dtype="Float32", grid=8)
    assert set(layout.scattered) == {
        f"model.layers.{layer}.mlp.experts.{name}"
        for layer in (0, 1)
        for name in ("gate_up_proj", "down_proj")
    }
    assert "published completely in each version" in caplog.text
    live = live_tensors(model)
    alone = to_checkpoint_tensors(model, {name: live[name] for name in layout.scattered})
    expected = to_checkpoint_tensors(model, live)
    held = {piece.tensor for pieces in layout.pieces.values() for piece in pieces}
    assert alone.keys() == expected.keys() - held
    for name, tensor in alone.items():
        assert torch.equal(tensor, expected[name])


def test_words_are_the_bits_of_the_rounded_values() -> None:
    values = torch.tensor([1.0, -0.0, 3.14159, 1e-40])
    rounded = tensor_bits.to_words(values, dtype=torch.bfloat16)
    assert rounded.dtype == np.uint16
    again = torch.from_numpy(rounded.astype(np.uint32) << 16).view(torch.float32)
    assert torch.equal(again, values.to(torch.bfloat16).float())
    assert tensor_bits.to_words(values, dtype=torch.float32).tobytes() == values.numpy().tobytes()


def test_experts_that_the_checkpoint_stacks_too_are_found() -> None:
    config = GptOssConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2)
    model = model_of(config)
    layout = trace_layout(model, dtype="Float32", grid=8)
    expected = to_checkpoint_tensors(model, live_tensors(model))
    found = moved(model, layout)
    live = live_tensors(model)
    whole = (
        to_checkpoint_tensors(model, {name: live[name] for name in layout.scattered})
        if layout.scattered
        else {}
    )
    for name, tensor in expected.items():
        assert torch.equal(whole.get(name, found[name]), tensor)
