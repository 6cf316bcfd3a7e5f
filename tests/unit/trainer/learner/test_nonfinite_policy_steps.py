"""Rewards, losses and gradients of policy steps that are no numbers, on the real learner."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from etude.common.api.storage import Storage
from etude.common.errors import InvalidFieldError
from etude.trainer.learner.batches import NonFiniteLossError, PolicyBatch, PolicySequence
from etude.trainer.learner.config import LearnerConfig
from etude.trainer.learner.learner import Learner
from etude.trainer.model.parameters import parameters_by_name

MODEL = Path(__file__).parents[3] / "data" / "tiny-model"
POLICIES = ("Stop", "Skip")
POISONED = 7
"""Token of every rollout."""

Build = Callable[..., Learner]
Poison = Callable[[Learner], Any]


@pytest.fixture
def build(tmp_path: Path) -> Build:
    torch.set_num_threads(1)

    def make(parameters: dict[str, Any] | None = None, **optimizer: Any) -> Learner:
        learner = Learner(
            LearnerConfig(
                run="uid",
                holder="test",
                model_folder=MODEL,
                storage=Storage(uri=f"file://{tmp_path}"),
            )
        )
        learner.start_phase(
            {
                "name": "rl",
                "type": "ReinforcementLearning",
                "maxSteps": 50,
                "optimizer": {"learningRate": "1e-2", **optimizer},
                "tasks": [{"name": "train", "uri": "file:///tasks", "environment": "repos"}],
                "algorithm": {"parameters": parameters or {}},
            },
            0,
        )
        return learner

    return make


def batch(**fields: Any) -> PolicyBatch:
    """Two groups of two rollouts, of which every one has an advantage."""
    drawn = np.random.default_rng(3)
    sequences = tuple(
        PolicySequence(
            token_ids=np.array([1, POISONED, *drawn.integers(8, 60, 8)], np.int32),
            loss_mask=np.array([False, *[True] * 9]),
            sampler_logprobs=np.full(10, -4.0, np.float32),
            rollout=rollout,
        )
        for rollout in range(4)
    )
    whole = PolicyBatch(
        sequences=sequences,
        rewards=np.array([1.0, 0.0, 0.0, 1.0]),
        groups=np.array([0, 0, 1, 1]),
        valid=np.ones(4, dtype=np.bool_),
    )
    return replace(whole, **fields)


@contextmanager
def loss_of(learner: Learner, value: float) -> Iterator[None]:
    """An embedding from which every loss is no number, for as long as the block."""
    weight = learner.policy.model.get_input_embeddings().weight
    healthy = weight[POISONED].detach().clone()
    with torch.no_grad():
        weight[POISONED] = value
    yield
    with torch.no_grad():
        weight[POISONED] = healthy


@contextmanager
def gradient_of(learner: Learner, value: float) -> Iterator[None]:
    """One gradient that is no number, under a loss that is, for as long as the block."""
    name, parameter = next(iter(parameters_by_name(learner.policy).items()))
    assert name
    handle = parameter.register_hook(lambda gradient: torch.full_like(gradient, value))
    yield
    handle.remove()


POISONS: dict[str, Poison] = {
    "loss-nan": lambda learner: loss_of(learner, math.nan),
    "loss-inf": lambda learner: loss_of(learner, math.inf),
    "gradient-nan": lambda learner: gradient_of(learner, math.nan),
    "gradient-inf": lambda learner: gradient_of(learner, -math.inf),
}


def moments(learner: Learner) -> dict[str, torch.Tensor]:
    """Copy of the optimiser's moments."""
    found = learner._current_phase().optimiser.moments()
    return {name: each.clone() for name, each in found.items()}


def same(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> bool:
    return before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in after)


@pytest.mark.parametrize("poison", POISONS.values(), ids=POISONS)
def test_stop_raises_and_leaves_weights_and_moments_as_they_were(
    build: Build, poison: Poison
) -> None:
    learner = build(onNonFinite="Stop")
    learner.policy_step(batch())
    digest, state = learner.digest(), moments(learner)
    with poison(learner), pytest.raises(NonFiniteLossError, match="the step was not applied"):
        learner.policy_step(batch())
    assert learner.digest() == digest
    assert same(state, moments(learner))


@pytest.mark.parametrize("poison", POISONS.values(), ids=POISONS)
def test_skip_leaves_the_batch_out_and_trains_the_next_one(build: Build, poison: Poison) -> None:
    learner = build(onNonFinite="Skip")
    learner.policy_step(batch())
    digest, state = learner.digest(), moments(learner)
    with poison(learner):
        result = learner.policy_step(batch())
    assert result.is_skipped
    assert (result.loss, result.grad_norm, result.mismatch_mean) == (0, 0, 0)
    assert learner.digest() == digest
    assert same(state, moments(learner))
    good = learner.policy_step(batch())
    assert not good.is_skipped
    assert math.isfinite(good.loss)
    assert good.weight_digest != digest


@pytest.mark.parametrize("poison", POISONS.values(), ids=POISONS)
def test_skip_ends_the_run_after_its_limit_of_batches_in_a_row(
    build: Build, poison: Poison
) -> None:
    learner = build(onNonFinite="Skip", maxSkippedSteps=2)
    digest = learner.digest()
    with poison(learner):
        for _ in range(2):
            assert learner.policy_step(batch()).is_skipped
        with pytest.raises(NonFiniteLossError, match="2 before it were left out"):
            learner.policy_step(batch())
    assert learner.digest() == digest


@pytest.mark.parametrize("poison", POISONS.values(), ids=POISONS)
def test_a_batch_of_several_updates_is_left_out_once(build: Build, poison: Poison) -> None:
    learner = build({"updatesPerBatch": 2}, onNonFinite="Skip", maxSkippedSteps=1)
    digest = learner.digest()
    with poison(learner):
        assert learner.policy_step(batch()).is_skipped
    assert learner.digest() == digest
    assert not learner.policy_step(batch()).is_skipped


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_no_number_is_refused_by_field_in_each_policy(
    build: Build, policy: str, reward: float
) -> None:
    learner = build(onNonFinite=policy)
    digest = learner.digest()
    with pytest.raises(InvalidFieldError, match="rewards: must be finite where valid"):
        learner.policy_step(batch(rewards=np.array([1.0, reward, 0.0, 1.0])))
    assert learner.digest() == digest


def test_a_masked_reward_that_is_no_number_counts_nowhere(build: Build) -> None:
    rewards = np.array([1.0, 0.0, math.nan, math.nan])
    valid = np.array([True, True, False, False])
    found = build().policy_step(
        batch(rewards=rewards, valid=valid, sequences=batch().sequences[:2])
    )
    clean = build().policy_step(
        batch(rewards=np.array([1.0, 0.0, 5.0, 9.0]), valid=valid, sequences=batch().sequences[:2])
    )
    assert math.isfinite(found.loss)
    assert found.weight_digest == clean.weight_digest


@pytest.mark.parametrize("policy", POLICIES)
def test_a_limit_of_the_divergence_does_not_hide_a_loss_that_is_no_number(
    build: Build, policy: str
) -> None:
    learner = build({"klLimit": 1e-6}, onNonFinite=policy)
    digest = learner.digest()
    with loss_of(learner, math.nan):
        if policy == "Stop":
            with pytest.raises(NonFiniteLossError, match="loss nan"):
                learner.policy_step(batch())
        else:
            assert learner.policy_step(batch()).is_skipped
    assert learner.digest() == digest
