"""Updating some parameters at a time is updating all of them at once."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from typing_extensions import override

from etude.common.api.run.phases import Phase
from etude.trainer.learner.optimiser import Optimiser
from etude.trainer.model.parameters import StepObserver, parameters_by_name
from etude.trainer.model.policy import Policy, load_policy

MODEL = Path(__file__).parents[3] / "data" / "tiny-model"
PHASE = Phase.model_validate(
    {
        "name": "sft",
        "type": "SupervisedFineTuning",
        "maxSteps": 50,
        "optimizer": {"learningRate": "3e-3", "weightDecay": "0.1", "gradientClip": "1000"},
        "data": [{"name": "traces", "uri": "file:///traces.jsonl"}],
    }
)


class Watch(StepObserver):
    """Wants some parameters, and notes the order."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.seen: list[str] = []

    @override
    def wants(self, name: str) -> bool:
        return self.every > 0 and len(name) % self.every == 0

    @override
    @contextmanager
    def observe_step(self, name: str, parameter: torch.Tensor) -> Iterator[None]:
        before = parameter.detach().clone()
        yield
        self.seen.append(name)
        assert not torch.equal(before, parameter)


def gradients(policy: Policy, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for place, parameter in enumerate(parameters_by_name(policy).values()):
        # One parameter has no gradient in some steps: it stays, and its moments too.
        draws = torch.randn(parameter.shape, generator=generator) * 10.0 ** (place % 7 - 5)
        parameter.grad = None if place == 3 and seed % 2 else draws


def plain(policy: Policy) -> torch.optim.AdamW:
    parameters = parameters_by_name(policy).values()
    return torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
        fused=True,
    )


@pytest.mark.parametrize("every", [0, 1, 2])
def test_watched_and_unwatched_steps_are_those_of_torch_bit_for_bit(every: int) -> None:
    ours, theirs = load_policy(MODEL, seed=1), load_policy(MODEL, seed=1)
    watch = Watch(every)
    optimiser, oracle = Optimiser(ours, PHASE, steps=watch), plain(theirs)
    settings = PHASE.optimizer
    for group in oracle.param_groups:
        group["betas"] = (float(settings.beta1), float(settings.beta2))
    for step in range(6):
        gradients(ours, step)
        gradients(theirs, step)
        optimiser.apply(step=step, loss=1.0)
        for group in oracle.param_groups:
            group["lr"] = optimiser.rate_at(step)
        oracle.step()
    expected = parameters_by_name(theirs)
    for name, parameter in parameters_by_name(ours).items():
        assert torch.equal(parameter, expected[name])
        for moment in ("exp_avg", "exp_avg_sq"):
            found = optimiser.moments()[f"{moment}.{name}"]
            assert torch.equal(found, oracle.state[expected[name]][moment])
    assert bool(watch.seen) == (every > 0)
    assert optimiser.updates == 6


def test_prepared_moments_have_the_names_and_shapes_of_grown_ones() -> None:
    policy = load_policy(MODEL, seed=1)
    grown, prepared = Optimiser(policy, PHASE), Optimiser(policy, PHASE)
    gradients(policy, 0)
    grown.apply(step=0, loss=1.0)
    prepared.reset_moments(updates=1)
    assert prepared.updates == grown.updates == 1
    shapes = [{n: t.shape for n, t in each.moments().items()} for each in (grown, prepared)]
    assert shapes[0] == shapes[1]
    prepared.reset_moments(updates=0)
    assert prepared.moments() == {}
