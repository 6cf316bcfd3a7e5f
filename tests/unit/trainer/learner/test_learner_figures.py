"""Figures of a step: what they cover, and what its weights are compared with."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from etude.common.api.run.phases import Algorithm
from etude.common.api.storage import Storage
from etude.trainer.algorithms.registry import build_algorithm
from etude.trainer.learner.batches import PolicyBatch, PolicySequence
from etude.trainer.learner.config import LearnerConfig
from etude.trainer.learner.gradients import accumulate_gradients
from etude.trainer.learner.learner import Learner
from etude.trainer.learner.objective import PolicyObjective
from etude.trainer.learner.rows import policy_rows
from etude.trainer.learner.sequence_packing import Packing
from etude.trainer.model.fsdp import RankGroup

MODEL = Path(__file__).parents[3] / "data" / "tiny-model"


def rl(**algorithm: Any) -> dict[str, object]:
    return {
        "name": "rl",
        "type": "ReinforcementLearning",
        "maxSteps": 50,
        "optimizer": {"learningRate": "1e-2"},
        "tasks": [{"name": "train", "uri": "file:///tasks", "environment": "repos"}],
        "algorithm": {"parameters": {"lossScale": 8}, **algorithm},
    }


Build = Callable[..., Learner]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Two threads that spin for each other on a busy machine take twenty times as long."""
    torch.set_num_threads(1)


@pytest.fixture
def build(tmp_path: Path) -> Build:
    def make(**fields: Any) -> Learner:
        return Learner(
            LearnerConfig(
                run="uid",
                holder="test",
                model_folder=MODEL,
                storage=Storage(uri=f"file://{tmp_path}"),
                **fields,
            )
        )

    return make


def rollouts(learner: Learner | None = None, *, logprob: float = -4.0) -> PolicyBatch:
    """Two groups of four; sampled by the learner's own weights if one is given."""
    rng = np.random.default_rng(1)
    sequences = []
    for rollout in range(8):
        length = int(rng.integers(6, 20))
        mask = rng.random(length) < 0.5
        mask[0], mask[1] = False, True
        token_ids = rng.integers(0, 64, length).astype(np.int32)
        logprobs = np.full(length, logprob, np.float32)
        if learner is not None:
            logprobs = exact_logprobs(learner, token_ids)
        sequences.append(
            PolicySequence(
                token_ids=token_ids, loss_mask=mask, sampler_logprobs=logprobs, rollout=rollout
            )
        )
    return PolicyBatch(
        sequences=tuple(sequences),
        rewards=np.array([1.0, 0, 0, 1, 1, 1, 1, 1]),
        groups=np.repeat([0, 1], 4),
        valid=np.ones(8, dtype=np.bool_),
    )


def exact_logprobs(learner: Learner, token_ids: np.ndarray) -> np.ndarray:
    ids = torch.from_numpy(token_ids.astype(np.int64))[None]
    with torch.no_grad():
        logits = learner.policy.model(input_ids=ids).logits[0, :-1]
    of_tokens = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    found: np.ndarray = np.concatenate([[0.0], of_tokens.numpy()]).astype(np.float32)
    return found


def alone() -> RankGroup:
    return RankGroup(rank=0, size=1, device=torch.device("cpu"))


def test_figures_of_filtered_rollouts_are_those_of_a_run_without_filter(build: Build) -> None:
    results = []
    for kept in ("None", "NonZeroAdvantage"):
        learner = build()
        learner.start_phase(rl(parameters={"groupFilter": kept}), 0)
        results.append(learner.policy_step(rollouts()))
    plain, filtered = results
    assert filtered.extra["filtered_tokens_scored"] > 0
    for name in ("entropy", "mismatch_mean", "mismatch_max", "clip_fraction"):
        assert getattr(filtered, name) == pytest.approx(getattr(plain, name), abs=1e-5), name


def test_the_size_of_the_sample_changes_no_weight(build: Build) -> None:
    digests, scored = set(), []
    for tokens in (1, 1_000):
        learner = build()
        learner.start_phase(rl(parameters={"filteredSampleTokens": tokens}), 0)
        result = learner.policy_step(rollouts())
        digests.add(result.weight_digest)
        scored.append(result.extra["filtered_tokens_scored"])
    assert len(digests) == 1
    assert 0 < scored[0] < scored[1]


def test_a_batch_of_equal_groups_shows_the_mismatch_of_its_sampler(build: Build) -> None:
    learner = build()
    learner.start_phase(rl(), 0)
    batch = rollouts(learner)
    batch.rewards[:] = 1.0
    for sequence in batch.sequences:
        sequence.sampler_logprobs[sequence.loss_mask] -= 0.5
    result = learner.policy_step(batch)
    assert result.trained_tokens == 0
    assert result.mismatch_mean == pytest.approx(0.5, abs=1e-4)
    assert result.entropy > 0


def test_only_tokens_of_the_current_weights_are_compared_for_the_guard(build: Build) -> None:
    learner = build()
    learner.start_phase(rl(), 0)
    batch = rollouts(learner)
    sequences: list[PolicySequence] = []
    counted = 0
    for sequence in batch.sequences:
        is_old = np.arange(sequence.token_ids.size) % 2 == 1
        sequence.sampler_logprobs[is_old] -= 0.5
        sequences.append(replace(sequence, is_current=~is_old))
        counted += int((sequence.loss_mask & ~is_old).sum())
    result = learner.policy_step(replace(batch, sequences=tuple(sequences)))
    assert result.mismatch_current is not None
    assert result.mismatch_current < 1e-5 < result.mismatch_mean
    assert result.current_tokens == counted


def test_a_batch_without_tokens_of_the_current_weights_says_so(build: Build) -> None:
    learner = build()
    learner.start_phase(rl(), 0)
    result = learner.policy_step(rollouts(learner))
    assert (result.mismatch_current, result.current_tokens) == (None, 0)


def test_a_second_gradient_pass_over_a_batch_is_refused(build: Build) -> None:
    learner = build()
    algorithm = build_algorithm(
        Algorithm.model_validate({"parameters": {"lossScale": 8}}), max_tokens=64
    )
    rows = policy_rows(rollouts(), algorithm).rows
    objective = PolicyObjective(algorithm=algorithm, reference=None)
    for _ in range(2):
        accumulate_gradients(
            learner.policy, rows, objective, ranks=alone(), packing=Packing(max_tokens=64)
        )
    with pytest.raises(AssertionError, match="one gradient pass"):
        objective.summary(alone(), trained_tokens=sum(row.places.size for row in rows))


def test_epsilon_damps_small_gradients(build: Build) -> None:
    moved = []
    for epsilon in ("1e-8", "1e3"):
        learner = build()
        phase = rl()
        phase["optimizer"] = {"learningRate": "1e-2", "epsilon": epsilon}
        learner.start_phase(phase, 0)
        before = torch.cat([p.detach().flatten().clone() for p in learner.policy.parameters()])
        learner.policy_step(rollouts())
        after = torch.cat([p.detach().flatten() for p in learner.policy.parameters()])
        moved.append(float((after - before).abs().max()))
    assert moved[1] < 1e-3 * moved[0]
