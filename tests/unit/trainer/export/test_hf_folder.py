"""Folders of weights that a learner exports, read back by transformers."""

import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from typing_extensions import Buffer, override

from etude.common.blobs import MemoryStore, Store
from etude.common.errors import StoreError
from etude.common.weights.tensors import safetensors
from etude.trainer.export import hf_folder
from etude.trainer.learner.batches import SupervisedSequence
from etude.trainer.learner.learner import Learner
from etude.trainer.model import checkpoint_layout

MODEL = Path(__file__).parents[3] / "data" / "tiny-model"
SFT = {
    "name": "sft",
    "type": "SupervisedFineTuning",
    "maxSteps": 1,
    "optimizer": {"learningRate": "1e-2"},
    "data": [{"name": "traces", "uri": "file:///traces.jsonl"}],
}

Build = Callable[..., Learner]


def test_an_exported_folder_loads_in_transformers_with_equal_weights(
    build: Build, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("tokenizer.json", "chat_template.jinja", "pytorch_model.bin.index.json"):
        (source / name).write_text("{}")
    (source / "config.json").write_bytes((MODEL / "config.json").read_bytes())
    learner = build(dtype="Float32", model=source)
    written = {info.key for info in learner.export("final")}
    assert written == {
        "final/model.safetensors",
        "final/config.json",
        "final/tokenizer.json",
        "final/chat_template.jinja",
    }
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "final")
    for name, tensor in learner.policy.model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)
    again = build(model=tmp_path / "run" / "final")
    assert again.digest() == learner.digest()


def test_an_export_in_several_files_has_one_complete_tensor_at_a_time(
    build: Build, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most = 0

    def gather(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal most
        complete = tensor.clone()
        alive.add(complete)
        most = max(most, len(alive))
        return complete

    monkeypatch.setattr(hf_folder, "gather_full", gather)
    monkeypatch.setattr(hf_folder, "FILE_BYTES", 20_000)
    learner = build(dtype="Float32")
    written = {info.key for info in learner.export("final")}
    assert "final/model.safetensors.index.json" in written
    assert most <= 2, "the next one is gathered while the last one is still named"
    largest = max(tensor.nbytes for tensor in learner.policy.model.state_dict().values())
    for info in store.list("final/model-0"):
        assert info.size <= max(20_000, largest) + 4_096
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "final").state_dict()
    for name, tensor in learner.policy.model.state_dict().items():
        assert torch.equal(loaded[name], tensor)


class FullStore(MemoryStore):
    """Has room for no file of weights."""

    @override
    def put(self, key: str, data: Buffer) -> None:
        raise StoreError(f"{key}: no space left")


def test_an_export_that_fails_gathers_all_the_same_for_its_peers(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    gathered: list[torch.Tensor] = []

    def gather(tensor: torch.Tensor) -> torch.Tensor:
        gathered.append(tensor)
        return tensor

    monkeypatch.setattr(hf_folder, "gather_full", gather)
    monkeypatch.setattr(hf_folder, "FILE_BYTES", 20_000)
    learner = build()
    learner._store = FullStore()
    with pytest.raises(StoreError, match="no space left"):
        learner.export("final")
    assert len(gathered) == len(checkpoint_layout.live_tensors(learner.policy.model))


def test_a_mixture_of_experts_is_exported_in_its_checkpoints_layout(
    build: Build, store: Store, tmp_path: Path
) -> None:
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        intermediate_size=32,
        moe_intermediate_size=8,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    original = Qwen3MoeForCausalLM(config)
    original.save_pretrained(tmp_path / "moe")
    learner = build(dtype="Float32", model=tmp_path / "moe")
    learner.export("final")
    data = store.get("final/model.safetensors")
    names = {tensor.name for tensor in safetensors.decode(data, where="final")}
    assert "model.layers.0.mlp.experts.3.down_proj.weight" in names
    assert "lm_head.weight" in names
    loaded = Qwen3MoeForCausalLM.from_pretrained(tmp_path / "run" / "final").state_dict()
    for name, tensor in original.state_dict().items():
        assert torch.equal(loaded[name], tensor)
    ids = np.arange(12, dtype=np.int32)
    text = SupervisedSequence(token_ids=ids, weights=np.ones(12, np.float32))
    learner.start_phase(SFT, 0)
    assert np.isfinite(learner.supervised_step([text]).loss)
