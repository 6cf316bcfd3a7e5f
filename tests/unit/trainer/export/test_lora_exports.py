"""A learner of adapters: versions and folders of merged weights, and the adapters for PEFT."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from etude.common.api.run.roles import Lora
from etude.common.api.storage import Storage
from etude.common.blobs import Store
from etude.trainer.learner.batches import SupervisedSequence
from etude.trainer.learner.config import LearnerConfig
from etude.trainer.learner.learner import Learner
from etude.trainer.learner.rank import LearnerRank

Build = Callable[..., Learner]
LORA = Lora(rank=4, alpha=16)
PHASE = {
    "name": "sft",
    "type": "SupervisedFineTuning",
    "maxSteps": 50,
    "optimizer": {"learningRate": "1e-2", "weightDecay": "0.01"},
    "data": [{"name": "traces", "uri": "file:///traces.jsonl"}],
}
TOKENS = torch.arange(40)[None]


def texts(seed: int) -> list[SupervisedSequence]:
    ids = np.random.default_rng(seed).integers(0, 64, (4, 12)).astype(np.int32)
    return [SupervisedSequence(token_ids=row, weights=np.ones(12, np.float32)) for row in ids]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A model folder with weights."""
    torch.manual_seed(0)
    config = Qwen3Config.from_pretrained(Path(__file__).parents[3] / "data" / "tiny-model")
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@torch.no_grad()
def logprobs(model: Any) -> torch.Tensor:
    scores: torch.Tensor = model(input_ids=TOKENS).logits.float().log_softmax(-1)
    return scores


@pytest.mark.parametrize(
    "targets", [(), ("q_proj", "mlp.down_proj"), ("layers.1.self_attn.v_proj",)], ids=len
)
def test_weights_folder_and_adapter_give_the_same_log_probs(
    targets: tuple[str, ...], build: Build, base: Path, store: Store, tmp_path: Path
) -> None:
    lora = LORA.model_copy(update={"target_modules": targets})
    learner = build(dtype="Float32", model=base, lora=lora)
    learner.start_phase(PHASE, 0)
    for seed in range(5):
        learner.supervised_step(texts(seed))
    learner.export("final/model")
    learner.export_adapter("final/adapter")

    folder = tmp_path / "run" / "final"
    trained = logprobs(learner.policy.model)
    untrained = AutoModelForCausalLM.from_pretrained(base)
    assert (logprobs(untrained) - trained).abs().max() > 1e-2
    exported = AutoModelForCausalLM.from_pretrained(folder / "model")
    torch.testing.assert_close(logprobs(exported), trained, atol=1e-6, rtol=0)
    adapted = PeftModel.from_pretrained(untrained, str(folder / "adapter"))
    torch.testing.assert_close(logprobs(adapted), trained, atol=1e-5, rtol=0)
    torch.testing.assert_close(logprobs(adapted.merge_and_unload()), trained, atol=1e-5, rtol=0)
    config = json.loads((folder / "adapter" / "adapter_config.json").read_bytes())
    assert (config["base_model_name_or_path"], config["revision"]) == ("Lab/Tiny", "v1")


def test_an_adapter_of_a_longer_context_comes_with_its_positions(
    build: Build, base: Path, store: Store, tmp_path: Path
) -> None:
    learner = build(dtype="Float32", model=base, lora=LORA)
    learner.start_phase({**PHASE, "contextExtension": {"positions": 512}}, 0)
    learner.supervised_step(texts(0))
    learner.export_adapter("final/adapter")
    folder = tmp_path / "run" / "final" / "adapter"
    trained = logprobs(learner.policy.model)
    config = AutoConfig.from_pretrained(folder)
    assert config.max_position_embeddings == 512
    longer = AutoModelForCausalLM.from_pretrained(base, config=config)
    adapted = PeftModel.from_pretrained(longer, str(folder))
    torch.testing.assert_close(logprobs(adapted), trained, atol=1e-5, rtol=0)
    short = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(folder))
    assert (logprobs(short) - trained).abs().max() > 1e-4


def test_a_learner_of_all_weights_exports_no_adapter(build: Build, tmp_path: Path) -> None:
    assert build().export_adapter("final/adapter") == []
    assert not (tmp_path / "run" / "final").exists()


@pytest.mark.parametrize("dtype", ["BFloat16", "Float32"])
def test_a_reader_of_deltas_has_the_merged_weights_at_every_version(
    build: Build, chain: Any, reader: Any, dtype: str
) -> None:
    learner = build(dtype=dtype, lora=LORA)
    learner.start_phase(PHASE, 0)
    names = {name for name, _ in learner.policy.model.named_parameters()}
    for number, steps in enumerate((0, 1, 3, 0, 1)):
        for step in range(steps):
            learner.supervised_step(texts(10 * number + step))
        reader.follow(chain.publish(learner))
        reader.assert_equal(learner)
    assert reader.tensor_words.keys() == names
    assert reader.kinds[0] == "complete"
    assert set(reader.kinds[1:]) == {"delta"}


def test_only_layers_with_an_adapter_are_in_a_delta(build: Build, chain: Any) -> None:
    learner = build(lora=Lora(rank=2, target_modules=("q_proj",)))
    learner.start_phase(PHASE, 0)
    chain.publish(learner)
    learner.supervised_step(texts(0))
    found = chain.publish(learner)
    # Two layers of 32 inputs and 4 heads of 8.
    assert 0 < found.stats.changed <= 2 * 32 * 32


def test_a_rank_lists_the_objects_of_model_and_adapter(
    base: Path, store: Store, tmp_path: Path
) -> None:
    storage = Storage(uri=f"file://{tmp_path}/run")
    rank = LearnerRank(
        LearnerConfig(run="uid", holder="test", model_folder=base, storage=storage, lora=LORA)
    )
    rank.load()
    listed = [each.key for each in rank.export("checkpoints/1/")]
    assert len(listed) == len(set(listed))
    assert {f"checkpoints/1/{key}" for key in listed} == {
        info.key for info in store.list("checkpoints/1/")
    }
    assert "adapter/adapter_model.safetensors" in listed
