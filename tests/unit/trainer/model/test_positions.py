"""Context extension: a trained model with more positions is the same model in every reader."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    Qwen3Config,
)

from etude.common.api.run.context_extension import ContextExtension
from etude.common.api.run.weights import Weights
from etude.common.api.storage import Storage
from etude.common.errors import InvalidFieldError
from etude.trainer.learner.batches import SupervisedSequence
from etude.trainer.learner.config import LearnerConfig
from etude.trainer.learner.learner import Learner
from etude.trainer.model.policy import Policy, load_policy
from etude.trainer.model.positions import set_positions

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
}
YARN = {"positions": 256}
THETA = {"positions": 256, "ropeScaling": "None", "ropeTheta": 1_000_000}


def text(length: int) -> SupervisedSequence:
    ids = np.random.default_rng(0).integers(0, 64, length).astype(np.int32)
    return SupervisedSequence(token_ids=ids, weights=np.ones(length, np.float32))


def phase(extension: dict[str, Any] | None, name: str = "long") -> dict[str, Any]:
    found = {
        "name": name,
        "type": "ContinuedPretraining",
        "maxSteps": 9,
        "optimizer": {"learningRate": "1e-3"},
        "data": [{"name": "texts", "uri": "file:///texts.jsonl"}],
    }
    return found if extension is None else found | {"contextExtension": extension}


def make_learner(folder: Path, run: Path) -> Learner:
    return Learner(
        LearnerConfig(
            run="uid",
            holder="test",
            model_folder=folder,
            seed=1,
            storage=Storage(uri=f"file://{run}"),
            weights=Weights(dtype="Float32"),
        )
    )


@pytest.mark.parametrize("extension", [YARN, THETA], ids=["yarn", "theta"])
def test_an_extended_model_trains_at_length_and_loads_as_it_was_exported(
    tmp_path: Path, extension: dict[str, Any]
) -> None:
    Qwen3Config(**SMALL).save_pretrained(tmp_path / "model")
    learner = make_learner(tmp_path / "model", tmp_path)
    learner.start_phase(phase(None, "short"), 0)
    with pytest.raises(InvalidFieldError, match="200 tokens, the model takes 64"):
        learner.supervised_step([text(200)])
    learner.start_phase(phase(extension), 0)
    assert 0 < learner.supervised_step([text(200)]).loss < 10
    with pytest.raises(InvalidFieldError, match="257 tokens, the model takes 256"):
        learner.supervised_step([text(257)])
    learner.export("export")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32)
    assert exported.config.max_position_embeddings == 256
    ids = torch.from_numpy(text(250).token_ids).long()[None]
    with torch.no_grad():
        expected = exported(input_ids=ids).logits.log_softmax(dim=-1)
        places = torch.arange(1, 250)
        found = learner.policy(ids, torch.zeros_like(places), places).logprobs
    chosen = expected[0, :-1].gather(1, ids[0, 1:, None])[:, 0]
    torch.testing.assert_close(found, chosen, atol=1e-5, rtol=0)


def test_a_restored_phase_has_its_positions_and_so_has_its_reference(tmp_path: Path) -> None:
    Qwen3Config(**SMALL).save_pretrained(tmp_path / "model")
    rl = {
        "name": "rl",
        "type": "ReinforcementLearning",
        "maxSteps": 9,
        "optimizer": {"learningRate": "1e-3"},
        "tasks": [{"name": "train", "uri": "file:///tasks", "environment": "repos"}],
        "algorithm": {"parameters": {"lossScale": 16, "klCoefficient": 0.05}},
        "contextExtension": YARN,
    }
    learner = make_learner(tmp_path / "model", tmp_path)
    learner.start_phase(rl, 0)
    learner.copy_state("saved")
    learner.save("saved")
    expected = learner.policy.model.model.rotary_emb
    other = make_learner(tmp_path / "model", tmp_path)
    other.restore("saved")
    other.start_phase(rl, 0)
    state = other._current_phase()
    assert isinstance(state.reference, Policy)
    for policy in (other.policy, state.reference):
        found = policy.model.model.rotary_emb
        assert torch.equal(found.inv_freq, expected.inv_freq)
        assert found.attention_scaling == expected.attention_scaling != 1.0
        assert policy.config.max_position_embeddings == 256


def test_a_phase_without_an_extension_has_the_positions_of_the_folder(tmp_path: Path) -> None:
    LlamaConfig(**SMALL).save_pretrained(tmp_path)
    policy = load_policy(tmp_path, seed=1)
    source = copy.deepcopy(policy.config)
    before = policy.model.model.rotary_emb.inv_freq.clone()
    set_positions(policy.model, source, ContextExtension.model_validate(YARN))
    assert not torch.equal(policy.model.model.rotary_emb.inv_freq, before)
    # Stages of an extension are of the folder's positions each, and do not multiply.
    set_positions(policy.model, source, ContextExtension.model_validate({"positions": 128}))
    assert policy.config.rope_parameters["factor"] == 2.0
    set_positions(policy.model, source, None)
    assert torch.equal(policy.model.model.rotary_emb.inv_freq, before)
    assert policy.config.max_position_embeddings == 64


@pytest.mark.parametrize(
    ("config", "extension", "reason"),
    [
        (GPT2Config(n_embd=16, n_layer=1, n_head=2), YARN, "gpt2 has no RoPE"),
        (LlamaConfig(**SMALL), {"positions": 32}, "has 64 positions already"),
        (
            Gemma3TextConfig(**{k: v for k, v in SMALL.items() if k != "rope_parameters"}),
            YARN,
            "layers have RoPE parameters of their own",
        ),
    ],
    ids=["learned", "fewer", "by layer"],
)
def test_positions_that_cannot_be_extended_are_refused_by_reason(
    config: Any, extension: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    config.save_pretrained(tmp_path)
    policy = load_policy(tmp_path, seed=1)
    source = copy.deepcopy(policy.config)
    with pytest.raises(ValueError, match=reason):
        set_positions(policy.model, source, ContextExtension.model_validate(extension))
    assert policy.config.to_dict() == source.to_dict()
