"""Balance of experts: biases of routers follow their loads, in checkpoints and versions too."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.support.trainer.expert_ranks import (
    BALANCING,
    DEEPSEEK,
    PHASE,
    QWEN,
    REPLAYING,
    Versions,
    rollouts,
    texts,
)
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig

from etude.common.api.run.roles import Lora
from etude.common.api.storage import Storage
from etude.common.errors import InvalidFieldError
from etude.trainer.learner.config import LearnerConfig
from etude.trainer.learner.learner import Learner

RATE, EXPERTS = 0.01, 8


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def open_learner(
    folder: Path, config: PretrainedConfig = DEEPSEEK, lora: Lora | None = None
) -> Learner:
    if not (folder / "model").is_dir():
        torch.manual_seed(1)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    return Learner(
        LearnerConfig(
            run="uid",
            holder="test",
            model_folder=folder / "model",
            storage=Storage(uri=f"file://{folder}"),
            packing="Padded",
            lora=lora,
        )
    )


def bias_of(learner: Learner) -> Tensor:
    """Of the one layer with experts. [E]."""
    [name] = learner.policy.routers.biases
    return learner.policy.get_buffer(name).clone()


def plain_loads(learner: Learner, sequences: list[Any]) -> Tensor:
    """Tokens of each expert, text by text. [E]."""
    chosen: list[Tensor] = []
    [router] = [m for n, m in learner.policy.named_modules() if n.endswith("layers.1.mlp.gate")]
    hook = router.register_forward_hook(lambda _m, _a, result: chosen.append(result[2]))
    with torch.no_grad():
        for each in sequences:
            learner.policy.model(input_ids=torch.from_numpy(each.token_ids.astype(np.int64))[None])
    hook.remove()
    return torch.bincount(torch.cat(chosen).flatten(), minlength=EXPERTS)


def test_an_update_moves_each_bias_towards_the_mean_load(tmp_path: Path) -> None:
    learner = open_learner(tmp_path)
    learner.start_phase(BALANCING, 0)
    loads = plain_loads(learner, texts(0)).double()
    assert not bias_of(learner).any()
    learner.supervised_step(texts(0))
    expected = RATE * (loads.mean() - loads).sign()
    assert expected.unique().numel() > 1
    torch.testing.assert_close(bias_of(learner), expected.float())


def test_loads_become_more_even(tmp_path: Path) -> None:
    ratios = {}
    for phase in (PHASE, BALANCING):
        learner = open_learner(tmp_path)
        settings = phase["optimizer"] | {"learningRate": "1e-6"}
        learner.start_phase(phase | {"maxSteps": 40, "optimizer": settings}, 0)
        results = [learner.supervised_step(texts(0)) for _ in range(40)]
        ratios[phase["optimizer"].get("expertBiasRate")] = results[-1].extra["expert_load_ratio"]
    assert ratios["0.01"] < 0.8 * ratios[None]


def test_experts_that_were_replayed_count_as_they_were_taken(tmp_path: Path) -> None:
    learner = open_learner(tmp_path)
    learner.start_phase(REPLAYING | {"optimizer": BALANCING["optimizer"]}, 0)
    batch = rollouts(0, has_routes=True)
    one_layer = tuple(
        replace(each, routes=None if each.routes is None else each.routes[:, :1])
        for each in batch.sequences
    )
    learner.policy_step(replace(batch, sequences=one_layer))
    # Almost all tokens took expert 5 and one of the first three.
    signs = bias_of(learner).sign().tolist()
    assert signs == [-1, -1, -1, 1, 1, -1, 1, 1]


def test_a_batch_that_is_left_out_moves_no_bias(tmp_path: Path) -> None:
    learner = open_learner(tmp_path)
    skipping = BALANCING["optimizer"] | {"onNonFinite": "Skip"}
    learner.start_phase(BALANCING | {"optimizer": skipping}, 0)
    with torch.no_grad():
        next(learner.policy.parameters()).fill_(torch.nan)
    assert learner.supervised_step(texts(0)).is_skipped
    assert not bias_of(learner).any()


def test_checkpoints_and_versions_have_the_biases(tmp_path: Path) -> None:
    learner = open_learner(tmp_path)
    versions = Versions(learner, 1)
    versions.encode()
    learner.start_phase(BALANCING, 0)
    learner.supervised_step(texts(0))
    versions.encode()  # a delta
    learner.copy_state("checkpoint")
    learner.save("checkpoint")
    learner.export("export")
    kept = bias_of(learner)
    learner.supervised_step(texts(1))
    assert (bias_of(learner) != kept).any()
    other = open_learner(tmp_path)
    other.restore("checkpoint")
    assert (bias_of(other) == kept).all()
    complete = Versions(other, 1)
    complete.encode()
    assert complete.states[0] == versions.states[1] != versions.states[0]
    exported = load_file(tmp_path / "export" / "model.safetensors")
    [name] = [each for each in exported if each.endswith("e_score_correction_bias")]
    torch.testing.assert_close(exported[name].float(), kept, rtol=1e-2, atol=0)


def test_a_model_without_biases_is_refused_by_field(tmp_path: Path) -> None:
    learner = open_learner(tmp_path, QWEN)
    with pytest.raises(InvalidFieldError, match=r"optimizer\.expertBiasRate.* have no bias"):
        learner.start_phase(BALANCING, 0)
    learner.start_phase(PHASE, 0)


def test_adapters_are_refused_by_field(tmp_path: Path) -> None:
    learner = open_learner(tmp_path, lora=Lora(rank=4, target_modules=("o_proj",)))
    with pytest.raises(InvalidFieldError, match=r"optimizer\.expertBiasRate.*adapters alone"):
        learner.start_phase(BALANCING, 0)
