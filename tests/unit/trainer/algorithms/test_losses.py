"""Gradients against independent implementations, and what no cut of a batch may change."""

import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from etude.common.api.run.algorithms import Correction
from etude.trainer.algorithms import aggregation, importance_sampling, losses
from etude.trainer.algorithms import losses as algorithms_losses
from etude.trainer.algorithms.importance_sampling import correction_weights


class Fixture(NamedTuple):
    """Four rollouts of up to seven tokens; shapes are [4, 7]."""

    logprobs: Tensor
    old: Tensor
    sampler: Tensor
    advantages: Tensor
    mask: Tensor


@pytest.fixture
def fixture() -> Fixture:
    """The batch on which TRL 1.16.0, verl 0.9.1 and OpenRLHF 0.11.2 gave the norms below."""
    g = torch.Generator().manual_seed(0)

    def n(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    old = -n(4, 7).abs() - 0.05
    logprobs = (old + 0.25 * n(4, 7)).clamp(max=-1e-3).requires_grad_()
    sampler = (old + 0.1 * n(4, 7)).clamp(max=-1e-3)
    advantages = n(4)[:, None].expand(4, 7)
    mask = torch.arange(7) < torch.tensor([7, 5, 3, 6])[:, None]
    mask[1, 2] = False
    mask[3, :2] = False
    return Fixture(logprobs, old, sampler, advantages, mask)


def gradient_norm(fixture: Fixture, values: Tensor, weights: Tensor) -> float:
    loss = (torch.where(fixture.mask, values, 0.0) * weights).sum()
    (gradient,) = torch.autograd.grad(loss, fixture.logprobs)
    return float(gradient.norm())


def clipped(fixture: Fixture) -> Tensor:
    return losses.ppo_clip(
        fixture.logprobs, anchor=fixture.old, advantages=fixture.advantages, low=0.2, high=0.28
    ).values


def test_the_clipped_surrogate_over_all_tokens_has_the_gradient_of_three_other_libraries(
    fixture: Fixture,
) -> None:
    weights = 1 / fixture.mask.sum().double()
    assert gradient_norm(fixture, clipped(fixture), weights) == pytest.approx(
        0.3260679860, abs=1e-10
    )


def test_the_constant_denominator_has_the_gradient_of_two_other_libraries(
    fixture: Fixture,
) -> None:
    counts = fixture.mask.sum(dim=1).numpy()
    weights = torch.from_numpy(aggregation.constant_weights(counts, scale=7))[:, None]
    assert gradient_norm(fixture, clipped(fixture), weights) == pytest.approx(
        0.2096151339, abs=1e-10
    )


def test_the_mean_per_rollout_has_the_gradient_of_another_library(fixture: Fixture) -> None:
    counts = fixture.mask.sum(dim=1).numpy()
    weights = torch.from_numpy(aggregation.rollout_mean_weights(counts))[:, None]
    assert gradient_norm(fixture, clipped(fixture), weights) == pytest.approx(
        0.2210367546, abs=1e-10
    )


def test_the_policy_gradient_has_the_gradient_of_another_librarys_unclipped_surrogate(
    fixture: Fixture,
) -> None:
    counts = fixture.mask.sum(dim=1).numpy()
    weights = torch.from_numpy(aggregation.constant_weights(counts, scale=7))[:, None]
    values = losses.policy_gradient(
        fixture.logprobs, anchor=fixture.old, advantages=fixture.advantages
    ).values
    assert gradient_norm(fixture, values, weights) == pytest.approx(0.2141554169, abs=1e-10)


def sequence_mean(fixture: Fixture, values: Tensor) -> Tensor:
    """Mean over the trained tokens of each rollout, once for each of its tokens."""
    total = torch.where(fixture.mask, values, 0.0).sum(dim=1, keepdim=True)
    return (total / fixture.mask.sum(dim=1, keepdim=True)).expand_as(values)


def weights_of(fixture: Fixture, correction: Correction) -> Tensor | None:
    return correction_weights(
        fixture.old,
        fixture.sampler,
        correction=correction,
        sequence_log_rho=sequence_mean(fixture, fixture.old - fixture.sampler),
    )


def rollout_weights(fixture: Fixture) -> Tensor:
    counts = fixture.mask.sum(dim=1).numpy()
    return torch.from_numpy(aggregation.rollout_mean_weights(counts))[:, None]


def test_the_ratio_of_a_rollout_has_the_gradient_of_three_other_libraries(
    fixture: Fixture,
) -> None:
    log_ratio = sequence_mean(fixture, fixture.logprobs.detach() - fixture.old)
    values = losses.sequence_clip(
        fixture.logprobs,
        log_ratio=log_ratio,
        advantages=fixture.advantages,
        low=0.2,
        high=0.28,
    ).values
    norm = gradient_norm(fixture, values, rollout_weights(fixture))
    assert norm == pytest.approx(0.2101173551, abs=1e-10)


def test_the_capped_ratio_has_the_gradient_of_two_other_libraries(fixture: Fixture) -> None:
    values = losses.capped_policy_gradient(
        fixture.logprobs, anchor=fixture.old, advantages=fixture.advantages, high=0.28
    ).values
    norm = gradient_norm(fixture, values, 1 / fixture.mask.sum().double())
    assert norm == pytest.approx(0.3180124570, abs=1e-10)


def test_the_total_variation_mask_has_the_gradient_of_another_library(fixture: Fixture) -> None:
    values = losses.total_variation_mask(
        fixture.logprobs, sampler=fixture.old, advantages=fixture.advantages, divergence=0.2
    ).values
    norm = gradient_norm(fixture, values, 1 / fixture.mask.sum().double())
    assert norm == pytest.approx(0.3293769603, abs=1e-10)


def test_the_soft_gate_has_the_gradient_of_two_other_libraries(fixture: Fixture) -> None:
    values = losses.soft_gate(
        fixture.logprobs,
        anchor=fixture.old,
        advantages=fixture.advantages,
        temperature_positive=1.0,
        temperature_negative=1.05,
    ).values
    norm = gradient_norm(fixture, values, rollout_weights(fixture))
    assert norm == pytest.approx(0.2236891283, abs=1e-10)


@pytest.mark.parametrize(
    ("correction", "norm"),
    [
        (Correction(kind="TIS", high=1.05), 0.3298020181),
        (Correction(kind="IcePop", low=0.95, high=1.05), 0.1782542288),
        (Correction(kind="SequenceMaskTIS", low=0.97, high=1.03), 0.3313),
    ],
)
def test_a_correction_has_the_gradient_of_three_other_libraries(
    fixture: Fixture, correction: Correction, norm: float
) -> None:
    rho = weights_of(fixture, correction)
    assert rho is not None
    weights = rho / fixture.mask.sum()
    tolerance = 1e-10 if len(str(norm)) > 6 else 5e-5
    assert gradient_norm(fixture, clipped(fixture), weights) == pytest.approx(norm, abs=tolerance)


def test_without_a_correction_no_weight_is_computed(fixture: Fixture) -> None:
    assert weights_of(fixture, Correction()) is None


def test_a_clipped_token_has_no_gradient_and_an_unclipped_one_has(fixture: Fixture) -> None:
    surrogate = losses.ppo_clip(
        fixture.logprobs, anchor=fixture.old, advantages=fixture.advantages, low=0.2, high=0.28
    )
    (gradient,) = torch.autograd.grad(surrogate.values.sum(), fixture.logprobs)
    assert surrogate.clipped.any()
    assert torch.equal(gradient == 0, surrogate.clipped)


@given(
    logprob=st.floats(-1e4, 0), anchor=st.floats(-1e4, 0), advantage=st.sampled_from([-2.0, 3.0])
)
def test_no_difference_of_log_probs_overflows(
    logprob: float, anchor: float, advantage: float
) -> None:
    trained = torch.tensor([logprob], requires_grad=True)
    other = torch.tensor([anchor])
    factor = torch.tensor([advantage])
    values = losses.ppo_clip(trained, anchor=other, advantages=factor, low=0.2, high=0.28).values
    values = values + losses.policy_gradient(trained, anchor=other, advantages=factor).values
    values = (
        values
        + losses.capped_policy_gradient(trained, anchor=other, advantages=factor, high=0.28).values
    )
    values = (
        values
        + losses.total_variation_mask(
            trained, sampler=other, advantages=factor, divergence=0.2
        ).values
    )
    values = (
        values
        + losses.soft_gate(
            trained,
            anchor=other,
            advantages=factor,
            temperature_positive=1.0,
            temperature_negative=1.05,
        ).values
    )
    log_ratio = (trained - other).detach()
    values = (
        values
        + losses.sequence_clip(
            trained, log_ratio=log_ratio, advantages=factor, low=0.2, high=0.28
        ).values
    )
    values = values + losses.log_ratio_penalty(trained, other, coefficient=1.0)
    (gradient,) = torch.autograd.grad(values.sum(), trained)
    assert math.isfinite(float(gradient))


def test_ice_pop_drops_what_truncation_keeps() -> None:
    rho = torch.tensor([0.1, 0.5, 1.0, 2.0, 9.0])
    assert importance_sampling.truncated_weights(rho, high=2).tolist() == pytest.approx(
        [0.1, 0.5, 1, 2, 2]
    )
    assert importance_sampling.ice_pop_weights(rho, low=0.5, high=2).tolist() == pytest.approx(
        [0, 0.5, 1, 2, 0]
    )


def test_the_constant_denominator_counts_rollouts_with_a_trained_token() -> None:
    assert aggregation.constant_weights(np.array([3, 0, 5]), scale=64).tolist() == [1 / 128] * 3


def test_no_trained_token_at_all_divides_by_nothing() -> None:
    nothing = np.zeros(2, dtype=np.int64)
    assert np.isfinite(aggregation.constant_weights(nothing, scale=64)).all()
    assert np.isfinite(aggregation.rollout_mean_weights(nothing)).all()


def test_the_penalty_in_the_reward_has_the_gradient_of_the_divergence() -> None:
    """By enumeration of a one-step policy: E[grad log p * (log p - log q)] = grad KL(p || q)."""
    logits = torch.tensor([0.3, -0.2, 1.1], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.1, 0.4, -0.3], dtype=torch.float64).log_softmax(0)
    logprobs = logits.log_softmax(0)
    probabilities = logprobs.exp()
    penalty = algorithms_losses.kl_penalty(logprobs, reference, coefficient=1.0)
    assert not penalty.requires_grad
    objective = (probabilities.detach() * penalty * logprobs).sum()
    divergence = (probabilities * (logprobs - reference)).sum()
    (ours,) = torch.autograd.grad(objective, logits, retain_graph=True)
    (true,) = torch.autograd.grad(divergence, logits)
    assert torch.allclose(ours, true, atol=1e-15)


def test_the_reported_divergence_is_never_negative_and_unbiased() -> None:
    p = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    q = torch.tensor([0.3, 0.3, 0.4], dtype=torch.float64)
    values = algorithms_losses.k3_estimate(q.log() - p.log())
    assert (values >= 0).all()
    assert float((p * values).sum()) == pytest.approx(float((p * (p / q).log()).sum()))
