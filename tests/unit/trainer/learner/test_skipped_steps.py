"""Batches whose loss or gradient is not finite, and narrow moments."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from etude.common.api.run.phases import Optimizer
from etude.common.api.storage import Storage
from etude.trainer.controller.reporting.rows import RowPosition, step_row
from etude.trainer.learner.adamw import AdamW
from etude.trainer.learner.batches import NonFiniteLossError, SupervisedSequence
from etude.trainer.learner.config import LearnerConfig
from etude.trainer.learner.learner import Learner

MODEL = Path(__file__).parents[3] / "data" / "tiny-model"
PLACE = RowPosition(time_s=0.0, phase="sft", step=1, global_step=1)
Build = Callable[..., Learner]


@pytest.fixture
def build(tmp_path: Path) -> Build:
    torch.set_num_threads(1)

    def make(**optimizer: Any) -> Learner:
        learner = Learner(
            LearnerConfig(
                run="uid",
                holder="test",
                model_folder=MODEL,
                storage=Storage(uri=f"file://{tmp_path}"),
            )
        )
        phase = {
            "name": "sft",
            "type": "SupervisedFineTuning",
            "maxSteps": 50,
            "optimizer": {"learningRate": "1e-2", **optimizer},
            "data": [{"name": "traces", "uri": "file:///traces.jsonl"}],
        }
        learner.start_phase(phase, 0)
        return learner

    return make


def text(*token_ids: int) -> list[SupervisedSequence]:
    ids = np.array(token_ids, np.int32)
    return [SupervisedSequence(token_ids=ids, weights=np.ones(ids.size, np.float32))]


def poison(learner: Learner, token: int) -> None:
    """Give a token an embedding that no hidden state survives."""
    with torch.no_grad():
        learner.policy.model.get_input_embeddings().weight[token] = torch.inf


def test_a_poisoned_batch_is_left_out_and_the_next_one_trains(build: Build) -> None:
    learner = build(onNonFinite="Skip")
    embeddings = learner.policy.model.get_input_embeddings().weight
    healthy = embeddings[7].detach().clone()
    before = {name: p.detach().clone() for name, p in learner.policy.named_parameters()}
    poison(learner, 7)
    result = learner.supervised_step(text(7, 8, 9))
    with torch.no_grad():
        embeddings[7] = healthy
    assert result.is_skipped
    assert (result.loss, result.grad_norm) == (0, 0)
    assert all(torch.equal(p, before[n]) for n, p in learner.policy.named_parameters())
    assert step_row(PLACE, result, seconds=1.0)["skipped"]
    after = learner.supervised_step(text(1, 2, 3))
    assert not after.is_skipped
    assert after.loss > 0
    assert "skipped" not in step_row(PLACE, after, seconds=1.0)


def test_too_many_in_a_row_end_the_run_and_a_good_one_starts_the_count_again(
    build: Build,
) -> None:
    learner = build(onNonFinite="Skip", maxSkippedSteps=2)
    embeddings = learner.policy.model.get_input_embeddings().weight
    healthy = embeddings[7].detach().clone()
    for _ in range(2):
        poison(learner, 7)
        assert learner.supervised_step(text(7, 8, 9)).is_skipped
        assert learner.supervised_step(text(7, 8, 9)).is_skipped
        with torch.no_grad():
            embeddings[7] = healthy
        assert not learner.supervised_step(text(1, 2, 3)).is_skipped
    poison(learner, 7)
    for _ in range(2):
        learner.supervised_step(text(7, 8, 9))
    with pytest.raises(NonFiniteLossError, match="2 before it were left out"):
        learner.supervised_step(text(7, 8, 9))


def test_a_phase_stops_at_the_first_one_unless_told_otherwise(build: Build) -> None:
    learner = build()
    poison(learner, 7)
    with pytest.raises(NonFiniteLossError, match="the step was not applied"):
        learner.supervised_step(text(7, 8, 9))


def test_bf16_moments_take_half_the_memory_and_follow_the_fp32_ones() -> None:
    weights: dict[str, torch.Tensor] = {}
    sizes: dict[torch.dtype, int] = {}
    for dtype in (torch.float32, torch.bfloat16):
        make = torch.Generator().manual_seed(3)
        parameter = torch.nn.Parameter(torch.zeros(200))
        adamw = AdamW({"w": parameter}, moments=dtype)
        for _ in range(30):
            parameter.grad = 1 + torch.randn(200, generator=make)
            adamw.update(["w"], rate=1e-2, betas=(0.9, 0.95), weight_decay=0.0, epsilon=1e-8)
        weights[str(dtype)] = parameter.detach()
        sizes[dtype] = sum(adamw.state["w"][m].nbytes for m in ("exp_avg", "exp_avg_sq"))
    assert sizes[torch.bfloat16] * 2 == sizes[torch.float32]
    torch.testing.assert_close(*weights.values(), rtol=0.02, atol=2e-3)


def test_bf16_moments_refuse_an_average_that_they_cannot_follow() -> None:
    with pytest.raises(ValidationError, match="moments BFloat16 needs beta2 of at most"):
        Optimizer.model_validate({"learningRate": "1", "moments": "BFloat16", "beta2": "0.999"})
