"""Estimators against the means that they estimate, by enumeration of everything that can happen."""

import itertools
import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from etude.common.evaluation.scores import expected_best
from etude.trainer.algorithms import losses

VOCABULARY = 5


def enumerate_exactly(*, seed: int) -> dict[str, float]:
    """Largest difference of each estimator from the exact value."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    policies = [(draw(VOCABULARY), draw(VOCABULARY).log_softmax(0)) for _ in range(20)]
    found = {
        "value of k3 against KL(sampler || policy)": max(_k3_value(*each) for each in policies),
        "value of r x - (r - 1) against KL(policy || sampler)": max(
            _weighted_value(*each) for each in policies
        ),
        "gradient of k1 in the reward against the divergence's": max(
            _gradient_error(*each, _k1_in_reward) for each in policies
        ),
        "gradient of half the log-ratio penalty (k2) against the divergence's": max(
            _gradient_error(*each, _k2_loss) for each in policies
        ),
        "gradient of k1 of a sequence against the divergence of sequences": max(
            _sequence_error(draw(VOCABULARY), draw(VOCABULARY, VOCABULARY), generator)
            for _ in range(20)
        ),
        "best of K against all subsets": _best_of_k_error(generator),
    }
    # Neither is offered as a loss, and this is why.
    zero = max(float(_mean_gradient(*each, _k1_loss).abs().max()) for each in policies)
    found["gradient of k1 as a loss against 0"] = zero
    return found


def _k3_value(logits: Tensor, reference: Tensor) -> float:
    sampler = logits.log_softmax(0)
    estimate = (sampler.exp() * losses.k3_estimate(reference - sampler)).sum()
    return abs(float(estimate - (sampler.exp() * (sampler - reference)).sum()))


def _weighted_value(logits: Tensor, sampler: Tensor) -> float:
    policy = logits.log_softmax(0)
    estimate = (sampler.exp() * losses.divergence_estimate(policy - sampler)).sum()
    return abs(float(estimate - (policy.exp() * (policy - sampler)).sum()))


Loss = Callable[[Tensor, Tensor], Tensor]
"""Loss of each token from its log-probs by the policy and the reference. [V], [V] -> [V]."""


def _k1_in_reward(policy: Tensor, reference: Tensor) -> Tensor:
    advantages = -losses.kl_penalty(policy, reference, coefficient=1.0)
    return losses.policy_gradient(policy, anchor=policy.detach(), advantages=advantages).values


def _k2_loss(policy: Tensor, reference: Tensor) -> Tensor:
    return losses.log_ratio_penalty(policy, reference, coefficient=0.5)


def _k1_loss(policy: Tensor, reference: Tensor) -> Tensor:
    return policy - reference


def _mean_gradient(logits: Tensor, reference: Tensor, loss: Loss) -> Tensor:
    """Mean gradient of a token's loss over all tokens that the policy may sample. [V]."""
    trained = logits.clone().requires_grad_()
    policy = trained.log_softmax(0)
    mean = (policy.detach().exp() * loss(policy, reference)).sum()
    (gradient,) = torch.autograd.grad(mean, trained)
    return gradient


def _gradient_error(logits: Tensor, reference: Tensor, loss: Loss) -> float:
    trained = logits.clone().requires_grad_()
    policy = trained.log_softmax(0)
    (exact,) = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), trained)
    return float((_mean_gradient(logits, reference, loss) - exact).abs().max() / exact.abs().max())


def _sequence_error(first: Tensor, second: Tensor, generator: torch.Generator) -> float:
    """Two steps, the second given the first: the sum of k1 in the reward of both tokens."""
    reference = torch.randn(VOCABULARY**2, generator=generator, dtype=torch.float64)
    reference = reference.log_softmax(0).reshape(VOCABULARY, VOCABULARY)
    trained = first.clone().requires_grad_(), second.clone().requires_grad_()
    steps = trained[0].log_softmax(0)[:, None], trained[1].log_softmax(1)
    policy = steps[0] + steps[1]
    exact = torch.autograd.grad(
        (policy.exp() * (policy - reference)).sum(), trained, retain_graph=True
    )
    # Both tokens of a sequence have its advantage.
    advantages = -losses.kl_penalty(policy, reference, coefficient=1.0)
    surrogates = [
        losses.policy_gradient(step, anchor=step.detach(), advantages=advantages).values
        for step in steps
    ]
    mean = (policy.detach().exp() * sum(surrogates)).sum()
    found = torch.autograd.grad(mean, trained)
    size = max(float(each.abs().max()) for each in exact)
    return max(float((a - b).abs().max()) for a, b in zip(found, exact, strict=True)) / size


def _best_of_k_error(generator: torch.Generator) -> float:
    worst = 0.0
    for size in range(1, 9):
        values = torch.randn(size, generator=generator, dtype=torch.float64).tolist()
        for k in range(1, size + 1):
            exact = statistics.fmean(map(max, itertools.combinations(values, k)))
            worst = max(worst, abs(expected_best(values, k=k) - exact))
    return worst
