"""What a step does to the weights, and what must leave them alone."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from etude.common.api.run.phases import Algorithm
from etude.common.api.storage import Storage
from etude.common.errors import InvalidFieldError, UserError, WrongStateError
from etude.trainer.algorithms.registry import build_algorithm
from etude.trainer.learner.batches import (
    NonFiniteLossError,
    PolicyBatch,
    PolicySequence,
    SupervisedSequence,
)
from etude.trainer.learner.config import LearnerConfig
from etude.trainer.learner.gradients import accumulate_gradients
from etude.trainer.learner.learner import Learner
from etude.trainer.learner.objective import PolicyObjective, imitation_loss
from etude.trainer.learner.rows import TrainingRow, policy_rows, supervised_rows
from etude.trainer.learner.sequence_packing import Packing
from etude.trainer.model.fsdp import RankGroup
from etude.trainer.model.parameters import parameters_by_name
from etude.trainer.model.policy import load_policy

MODEL = Path(__file__).parents[3] / "data" / "tiny-model"
ALONE = RankGroup(rank=0, size=1, device=torch.device("cpu"))
SFT = {
    "name": "sft",
    "type": "SupervisedFineTuning",
    "maxSteps": 50,
    "optimizer": {"learningRate": "1e-2", "weightDecay": "0.01"},
    "data": [{"name": "traces", "uri": "file:///traces.jsonl"}],
}


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


def texts(count: int = 6, *, seed: int = 0) -> list[SupervisedSequence]:
    rng = np.random.default_rng(seed)
    return [
        SupervisedSequence(
            token_ids=rng.integers(0, 64, length).astype(np.int32),
            weights=rng.choice(np.array([0.5, 1.0], np.float32), length),
        )
        for length in rng.integers(3, 20, count)
    ]


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


def gradient(
    rows: list[TrainingRow], objective: Any, *, max_tokens: int
) -> tuple[float, torch.Tensor]:
    policy = load_policy(MODEL, seed=5)
    loss = accumulate_gradients(
        policy, rows, objective, ranks=ALONE, packing=Packing(max_tokens=max_tokens)
    )
    parts = [p.grad.flatten() for p in policy.parameters() if p.grad is not None]
    return loss, torch.cat(parts)


@pytest.mark.parametrize("max_tokens", [64, 30, 7])
def test_the_gradient_does_not_depend_on_the_microbatches(max_tokens: int) -> None:
    algorithm = build_algorithm(Algorithm.model_validate({"name": "GRPO"}), max_tokens=64)
    rows = policy_rows(rollouts(), algorithm).rows
    whole, expected = gradient(
        rows, PolicyObjective(algorithm=algorithm, reference=None), max_tokens=10_000
    )
    loss, found = gradient(
        rows, PolicyObjective(algorithm=algorithm, reference=None), max_tokens=max_tokens
    )
    assert loss == pytest.approx(whole, abs=1e-6)
    assert torch.allclose(found, expected, atol=1e-6)


@settings(max_examples=5)  # each example is several backward passes
@given(shares=st.lists(st.integers(0, 2), min_size=4, max_size=4))
def test_the_gradient_does_not_depend_on_who_trains_which_sequence(shares: list[int]) -> None:
    algorithm = build_algorithm(
        Algorithm.model_validate({"parameters": {"lossScale": 8}}), max_tokens=64
    )
    rows = policy_rows(rollouts(), algorithm).rows
    whole = PolicyObjective(algorithm=algorithm, reference=None)
    _, expected = gradient(rows, whole, max_tokens=10_000)
    total = torch.zeros_like(expected)
    for share in range(3):
        own = [row for row, owner in zip(rows, shares, strict=True) if owner == share]
        part = PolicyObjective(algorithm=algorithm, reference=None)
        total += gradient(own, part, max_tokens=40)[1] if own else 0
    assert torch.allclose(total, expected, atol=1e-6)


def test_the_supervised_loss_is_the_weighted_mean_over_the_whole_batch() -> None:
    sequences = texts()
    policy = load_policy(MODEL, seed=5)
    total = torch.zeros(())
    for sequence in sequences:
        ids = torch.from_numpy(sequence.token_ids.astype(np.int64))[None]
        logits = policy.model(input_ids=ids).logits[0, :-1]
        losses = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
        total = total + (losses * torch.from_numpy(sequence.weights[1:])).sum()
    expected = float(total.detach()) / sum(float(s.weights[1:].sum()) for s in sequences)
    for max_tokens in (10_000, 25):
        loss, _ = gradient(supervised_rows(sequences), imitation_loss, max_tokens=max_tokens)
        assert loss == pytest.approx(expected, abs=1e-5)


def test_imitation_lowers_the_loss(build: Build) -> None:
    learner = build()
    learner.start_phase(SFT, 0)
    results = [learner.supervised_step(texts()) for _ in range(20)]
    assert results[-1].loss < results[0].loss - 0.5
    assert results[0].tokens == sum(s.token_ids.size for s in texts())
    assert results[0].trained_tokens == results[0].tokens - 6
    assert results[0].learning_rate == pytest.approx(1e-2)


def test_the_same_seed_gives_the_same_bits(build: Build) -> None:
    learners = [build(seed=3), build(seed=3)]
    digests = []
    for learner in learners:
        learner.start_phase(SFT, 0)
        learner.supervised_step(texts())
        learner.start_phase(rl(), 0)
        digests.append(learner.policy_step(rollouts()).weight_digest)
    assert digests[0] == digests[1] == learners[0].digest()
    assert build(seed=4).digest() != build(seed=3).digest()


def test_rewarded_rollouts_become_likelier(build: Build) -> None:
    learner = build()
    learner.start_phase(rl(), 0)
    batch = rollouts(learner)
    better, worse = batch.sequences[0], batch.sequences[1]

    def likelihood(sequence: PolicySequence) -> float:
        found = exact_logprobs(learner, sequence.token_ids)
        return float(found[sequence.loss_mask].sum())

    before = likelihood(better), likelihood(worse)
    learner.policy_step(batch)
    assert likelihood(better) > before[0]
    assert likelihood(worse) < before[1]


def test_weights_that_sampled_show_no_mismatch_and_no_clipping(build: Build) -> None:
    learner = build()
    learner.start_phase(rl(), 0)
    result = learner.policy_step(rollouts(learner))
    assert result.mismatch_max < 1e-5
    assert result.clip_fraction == 0
    # Freshly drawn weights are nearly uniform over 64 tokens.
    assert result.entropy == pytest.approx(np.log(64), abs=0.1)
    assert result.extra["filtered_rollouts"] == 4
    assert result.extra["removed_tokens"] == 0


def test_another_samplers_log_probs_show_as_mismatch(build: Build) -> None:
    learner = build()
    learner.start_phase(rl(), 0)
    batch = rollouts(learner)
    for sequence in batch.sequences:
        sequence.sampler_logprobs[sequence.loss_mask] -= 0.5
    result = learner.policy_step(batch)
    assert result.mismatch_mean == pytest.approx(0.5, abs=1e-4)
    # exp(0.5) is beyond 1 + clipHigh: tokens of positive advantage are clipped.
    assert 0 < result.clip_fraction < 1


@pytest.mark.parametrize("name", ["DrGRPO", "RLOO"])
def test_the_loss_scale_divides_the_gradient(build: Build, name: str) -> None:
    norms = []
    for scale in (8, 16):
        learner = build()
        learner.start_phase(rl(name=name, parameters={"lossScale": scale}), 0)
        norms.append(learner.policy_step(rollouts()).grad_norm)
    assert norms[0] == pytest.approx(2 * norms[1])


def test_the_filter_saves_the_pass_and_changes_nothing_else(build: Build) -> None:
    results = []
    for kept in ("None", "NonZeroAdvantage"):
        learner = build()
        learner.start_phase(rl(parameters={"groupFilter": kept}), 0)
        results.append(learner.policy_step(rollouts()))
    assert results[0].tokens > results[1].tokens
    assert results[0].grad_norm == pytest.approx(results[1].grad_norm, abs=1e-7)


def test_the_divergence_is_from_the_weights_at_the_start_of_the_phase(build: Build) -> None:
    learner = build()
    learner.start_phase(rl(parameters={"klCoefficient": 0.1}), 0)
    first = learner.policy_step(rollouts())
    second = learner.policy_step(rollouts())
    assert first.extra["reference_kl"] == 0
    assert second.extra["reference_kl"] != 0


def test_a_batch_without_signal_moves_the_schedule_but_no_weight(build: Build) -> None:
    learner = build()
    learner.start_phase(rl(), 0)
    before = learner.digest()
    batch = rollouts()
    batch.rewards[:] = 1.0
    result = learner.policy_step(batch)
    assert (result.loss, result.grad_norm, result.trained_tokens) == (0, 0, 0)
    assert result.weight_digest == before


def test_a_non_finite_loss_changes_nothing_and_the_next_step_works(build: Build) -> None:
    learner = build()
    learner.start_phase(SFT, 0)
    learner.supervised_step(texts())
    before = learner.digest()
    weight = next(iter(parameters_by_name(learner.policy).values()))
    kept = weight.detach().clone()
    with torch.no_grad():
        weight[0] = torch.nan
    with pytest.raises(NonFiniteLossError, match="phase sft, step 1: loss nan"):
        learner.supervised_step(
            [SupervisedSequence(token_ids=np.zeros(4, np.int32), weights=np.ones(4, np.float32))]
        )
    with torch.no_grad():
        weight.copy_(kept)
    assert learner.digest() == before
    twin = build()
    twin.start_phase(SFT, 0)
    twin.supervised_step(texts())
    assert (
        learner.supervised_step(texts(seed=1)).weight_digest
        == twin.supervised_step(texts(seed=1)).weight_digest
    )


def test_a_token_outside_the_vocabulary_is_refused_before_anything_happens(build: Build) -> None:
    learner = build()
    learner.start_phase(SFT, 0)
    before = learner.digest()
    wrong = SupervisedSequence(
        token_ids=np.array([1, 64], np.int32), weights=np.ones(2, np.float32)
    )
    with pytest.raises(InvalidFieldError, match="64 is outside the vocabulary of 64"):
        learner.supervised_step([wrong])
    long = SupervisedSequence(token_ids=np.zeros(129, np.int32), weights=np.ones(129, np.float32))
    with pytest.raises(InvalidFieldError, match="129 tokens, the model takes 128"):
        learner.supervised_step([long])
    assert learner.digest() == before


def test_a_step_without_its_phase_is_refused(build: Build) -> None:
    learner = build()
    with pytest.raises(WrongStateError, match="no phase was started"):
        learner.supervised_step(texts())
    learner.start_phase(SFT, 0)
    with pytest.raises(WrongStateError, match="phase sft has no algorithm"):
        learner.policy_step(rollouts())


def test_bad_parameters_of_an_algorithm_are_refused_at_the_start_of_the_phase(build: Build) -> None:
    with pytest.raises(ValueError, match="clipLwo: DrGRPO has no such parameter"):
        build().start_phase(rl(parameters={"clipLwo": 1}), 0)


def test_a_folder_without_a_usable_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no config\.json"):
        load_policy(tmp_path, seed=0)
    (tmp_path / "config.json").write_text('{"model_type": "abacus"}')
    with pytest.raises(UserError, match=r"config\.json cannot be used"):
        load_policy(tmp_path, seed=0)
    shutil.copy(MODEL / "config.json", tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(UserError, match="the model cannot be loaded"):
        load_policy(tmp_path, seed=0)
    save_file({"model.norm.weight": torch.ones(32)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"misshapen tensors: .*model\.embed_tokens"):
        load_policy(tmp_path, seed=0)
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(UserError, match="holds pickled weights"):
        load_policy(tmp_path, seed=0)


def test_held_out_loss_is_what_a_step_would_report_and_changes_nothing(build: Build) -> None:
    learner = build()
    learner.start_phase(SFT, 0)
    rng = np.random.default_rng(0)
    sequences = [
        SupervisedSequence(
            token_ids=rng.integers(0, 64, length).astype(np.int32),
            weights=rng.choice(np.array([0.0, 0.5, 1.0], np.float32), length),
        )
        for length in (3, 17, 9)
    ]
    before = learner.digest()
    loss = learner.held_out_loss(sequences)
    assert learner.digest() == before
    assert learner.supervised_step(sequences).loss == pytest.approx(loss, abs=1e-6)
