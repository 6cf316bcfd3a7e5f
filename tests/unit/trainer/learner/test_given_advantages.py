"""Batches with given advantages, and the divergence from the weights that sampled one."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from etude.common.api.run.phases import Algorithm, Phase
from etude.common.api.storage import Storage
from etude.common.errors import InvalidFieldError
from etude.trainer.algorithms import losses
from etude.trainer.algorithms.advantages import centred_rewards
from etude.trainer.algorithms.registry import STALE_CORRECTION, build_algorithm
from etude.trainer.learner.batches import PolicyBatch, PolicySequence
from etude.trainer.learner.config import LearnerConfig
from etude.trainer.learner.learner import Learner
from etude.trainer.learner.phase import build_phase_algorithm
from etude.trainer.learner.rows import policy_rows

MODEL = Path(__file__).parents[3] / "data" / "tiny-model"
COMMON = {"maxSteps": 9, "optimizer": {"learningRate": "1e-2"}}
RL = Phase.model_validate(
    {
        **COMMON,
        "name": "rl",
        "type": "ReinforcementLearning",
        "tasks": [{"name": "train", "uri": "file:///tasks", "environment": "repos"}],
        "algorithm": {"parameters": {"correction": {"kind": "TIS", "high": 2}, "lossScale": 8}},
    }
)
FEEDBACK = Phase.model_validate(
    {
        **COMMON,
        "name": "users",
        "type": "Feedback",
        "feedback": {"uri": "file:///feedback", "maxTokens": 16},
        "algorithm": {"parameters": {"lossScale": 8}},
    }
)


def draw_batch(seed: int, *, groups: int = 2, size: int = 3) -> PolicyBatch:
    drawn = np.random.default_rng(seed)
    count = groups * size
    sequences = []
    for rollout in range(count):
        length = int(drawn.integers(4, 12))
        mask = drawn.random(length) < 0.6
        mask[0], mask[1] = False, True
        sequences.append(
            PolicySequence(
                token_ids=drawn.integers(0, 64, length).astype(np.int32),
                loss_mask=mask,
                sampler_logprobs=-drawn.random(length).astype(np.float32),
                rollout=rollout,
            )
        )
    return PolicyBatch(
        sequences=tuple(sequences),
        rewards=drawn.integers(0, 2, count).astype(np.float64),
        groups=np.repeat(np.arange(groups), size),
        valid=np.ones(count, dtype=np.bool_),
    )


def with_centred(batch: PolicyBatch) -> PolicyBatch:
    """The batch with the advantages that DrGRPO would compute, and without its groups."""
    values = centred_rewards(batch.rewards, groups=batch.groups, valid=batch.valid)
    return dataclasses.replace(batch, advantages=values, groups=np.zeros_like(batch.groups))


@given(st.integers(0, 1_000))
def test_given_advantages_replace_the_algorithms_own(seed: int) -> None:
    batch = draw_batch(seed)
    algorithm = build_algorithm(Algorithm(), max_tokens=16)
    computed, taken = (policy_rows(each, algorithm) for each in (batch, with_centred(batch)))
    assert len(computed.rows) == len(taken.rows)
    for one, other in zip(computed.rows, taken.rows, strict=True):
        for name in ("token_ids", "places", "weights", "advantages", "sampler_logprobs"):
            assert np.array_equal(getattr(one, name), getattr(other, name))


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def build(folder: Path, phase: Phase) -> Learner:
    storage = Storage(uri=folder.as_uri())
    config = LearnerConfig(run="uid", holder="test", model_folder=MODEL, storage=storage)
    learner = Learner(config)
    learner.start_phase(phase.to_json(), 0)
    return learner


def test_a_feedback_step_is_the_step_of_reinforcement_learning_bit_for_bit(tmp_path: Path) -> None:
    batch = draw_batch(7)
    computed = build(tmp_path / "rl", RL).policy_step(batch)
    taken = build(tmp_path / "users", FEEDBACK).policy_step(with_centred(batch))
    assert taken.weight_digest == computed.weight_digest
    assert (taken.loss, taken.grad_norm) == (computed.loss, computed.grad_norm)
    assert computed.grad_norm > 0


def test_windows_are_corrected_by_default_and_bounded_by_their_own_length() -> None:
    assert FEEDBACK.feedback is not None
    plain = FEEDBACK.model_copy(update={"algorithm": Algorithm()})
    algorithm = build_phase_algorithm(plain)
    assert algorithm is not None
    assert algorithm.parameters.token_correction == STALE_CORRECTION
    assert algorithm.token_weights(np.array([5])).tolist() == [1 / 16]


def test_an_advantage_that_is_no_number_is_refused() -> None:
    batch = draw_batch(1)
    values = np.full(batch.rewards.shape, np.nan)
    with pytest.raises(InvalidFieldError, match="advantages"):
        dataclasses.replace(batch, advantages=values)


simplex = st.lists(st.floats(0.02, 1), min_size=5, max_size=5)


@given(simplex, simplex)
def test_the_estimate_has_the_exact_divergence_as_its_mean(
    policy: list[float], sampler: list[float]
) -> None:
    p, q = (torch.tensor(each, dtype=torch.float64) for each in (policy, sampler))
    p, q = p / p.sum(), q / q.sum()
    estimates = losses.divergence_estimate((p / q).log())
    exact = torch.distributions.kl_divergence(
        torch.distributions.Categorical(p), torch.distributions.Categorical(q)
    )
    assert (estimates >= -1e-12).all()
    assert float((q * estimates).sum()) == pytest.approx(float(exact), abs=1e-9)


def sampled_by(learner: Learner, batch: PolicyBatch) -> PolicyBatch:
    """The batch with the log-probs of a learner's own weights."""
    sequences = []
    for each in batch.sequences:
        ids = torch.from_numpy(each.token_ids.astype(np.int64))[None]
        with torch.no_grad():
            logits = learner.policy.model(input_ids=ids).logits[0, :-1]
        scores = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].numpy()
        logprobs = np.concatenate([[0.0], scores]).astype(np.float32)
        sequences.append(dataclasses.replace(each, sampler_logprobs=logprobs))
    return dataclasses.replace(batch, sequences=tuple(sequences))


def test_the_divergence_is_zero_before_a_step_and_measuring_it_trains_nothing(
    tmp_path: Path,
) -> None:
    learner = build(tmp_path, FEEDBACK)
    batch = with_centred(sampled_by(learner, draw_batch(3)))
    before = learner.digest()
    assert learner.measure_divergence(batch) == pytest.approx(0, abs=1e-9)
    assert learner.digest() == before
    learner.policy_step(batch)
    moved = learner.measure_divergence(batch)
    assert moved > 1e-6
    log_ratios = np.concatenate(
        [
            (new.sampler_logprobs - old.sampler_logprobs)[old.loss_mask]
            for new, old in zip(sampled_by(learner, batch).sequences, batch.sequences, strict=True)
        ]
    ).astype(np.float64)
    ratios = np.exp(log_ratios)
    assert moved == pytest.approx(float((ratios * log_ratios - ratios + 1).mean()), rel=1e-3)
