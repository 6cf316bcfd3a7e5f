"""Optimiser: learning-rate schedules, gradient clipping and AdamW on fp32 master weights."""

import logging
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from etude.common.api.meta import number
from etude.common.api.run.phases import Optimizer, Phase
from etude.trainer.learner.adamw import MOMENTS, AdamW
from etude.trainer.learner.batches import NonFiniteLossError
from etude.trainer.model.lora import merge_update
from etude.trainer.model.mtp.heads import is_head_parameter
from etude.trainer.model.parameters import StepObserver, gather_full, parameters_by_name
from etude.trainer.model.policy import Policy

log = logging.getLogger(__name__)

_MOMENTS = {"Float32": torch.float32, "BFloat16": torch.bfloat16}


class Update(NamedTuple):
    """Result of one optimiser step."""

    grad_norm: float
    learning_rate: float
    is_skipped: bool = False
    """True if the gradient was not finite and the phase leaves such batches out."""
    figures: Mapping[str, float] = MappingProxyType({})
    """Further figures of the step by name."""


class Optimiser:
    """Steps of one phase on the parameters of one policy."""

    def __init__(self, policy: Policy, phase: Phase, *, steps: StepObserver | None = None) -> None:
        """Begin a phase."""
        self._parameters = {
            name: p for name, p in parameters_by_name(policy).items() if p.requires_grad
        }
        self._adamw = AdamW(self._parameters, moments=_MOMENTS[phase.optimizer.moments])
        self._steps = steps
        self._policy = policy
        self._num_skipped = 0
        """Batches in a row that were left out."""
        self.update_settings(phase)

    def update_settings(self, phase: Phase) -> None:
        """Apply the settings of a phase; keep the moments."""
        self._phase = phase
        settings = phase.optimizer
        self._clip = number(settings.gradient_clip)
        self._betas = (number(settings.beta1), number(settings.beta2))
        self._weight_decay = number(settings.weight_decay)
        self._epsilon = number(settings.epsilon)

    def rate_at(self, step: int) -> float:
        """Learning rate of a step of the phase."""
        return learning_rate(step, optimizer=self._phase.optimizer, max_steps=self._phase.max_steps)

    def apply(self, *, step: int, loss: float) -> Update:
        """Clip the gradient and apply it; collective.

        Raises:
            NonFiniteLossError: the loss or the gradient is NaN or infinite, and the phase stops
                then, or left out its limit of batches before; no weight changed.
        """
        norm = float(self.gradient_norm())
        head_norm = float(self.gradient_norm(of_heads=True))
        rate = self.rate_at(step)
        if not all(map(math.isfinite, (loss, norm, head_norm))):
            # All are totals over all ranks, so that all of them decide alike.
            self._skip(
                f"phase {self._phase.name}, step {step}: loss {loss}, gradient norm {norm},"
                f" of heads {head_norm};"
                " the step was not applied"
            )
            return Update(0.0, rate, is_skipped=True)
        self._num_skipped = 0
        self.apply_gradient(norm=norm, rate=rate, head_norm=head_norm)
        return Update(norm, rate)

    def gradient_norm(self, *, of_heads: bool = False) -> Tensor:
        """Norm of the gradient over all ranks, a scalar; collective.

        Args:
            of_heads: that of the heads of multi-token prediction, which no other norm counts.
        """
        by_mesh: dict[object, list[Tensor]] = {}
        for gradient in self._gradients(of_heads=of_heads):
            # Divided experts are on a mesh of their own, and no operation takes two meshes.
            by_mesh.setdefault(getattr(gradient, "device_mesh", None), []).append(gradient)
        norms = [gather_full(torch.nn.utils.get_total_norm(each)) for each in by_mesh.values()]
        if len(norms) == 1:
            return norms[0]
        return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())

    def _gradients(self, *, of_heads: bool) -> list[Tensor]:
        return [
            p.grad
            for name, p in self._parameters.items()
            if p.grad is not None and is_head_parameter(name) == of_heads
        ]

    def apply_gradient(self, *, norm: float, rate: float, head_norm: float = 0.0) -> None:
        """Clip the gradient, which has these norms, and update all parameters by it.

        Heads are clipped apart, so that they change no step of the policy.
        """
        for of_heads, found in ((False, norm), (True, head_norm)):
            if found > self._clip:
                for gradient in self._gradients(of_heads=of_heads):
                    gradient.mul_(self._clip / found)
        with merge_update(self._policy, self._steps):
            self._step_all(rate)

    def _skip(self, problem: str) -> None:
        """Leave a batch out.

        Raises:
            NonFiniteLossError: the phase does not allow it, or not so often in a row.
        """
        settings = self._phase.optimizer
        if settings.on_non_finite == "Stop":
            raise NonFiniteLossError(problem)
        if self._num_skipped >= settings.max_skipped_steps:
            raise NonFiniteLossError(f"{problem}; {self._num_skipped} before it were left out")
        self._num_skipped += 1
        log.warning("%s", problem)

    def _step_all(self, rate: float) -> None:
        """Run one AdamW update, parameter by parameter where it is observed."""
        unseen = []
        for name, parameter in self._parameters.items():
            if parameter.grad is None or self._steps is None or not self._steps.wants(name):
                unseen.append(name)
                continue
            with self._steps.observe_step(name, parameter):
                self._update([name], rate)
        self._update(unseen, rate)

    def _update(self, names: Sequence[str], rate: float) -> None:
        # Norms and biases are not decayed.
        decayed = [name for name in names if self._parameters[name].ndim > 1]
        spared = [name for name in names if self._parameters[name].ndim <= 1]
        for group, decay in ((decayed, self._weight_decay), (spared, 0.0)):
            self._adamw.update(
                group,
                rate=rate,
                betas=self._betas,
                weight_decay=decay,
                epsilon=self._epsilon,
            )

    def moments(self) -> dict[str, Tensor]:
        """Moments by name, live and sharded as they are; none before the first update."""
        return {
            f"{moment}.{name}": state[moment]
            for name, state in sorted(self._adamw.state.items())
            for moment in MOMENTS
        }

    @property
    def updates(self) -> int:
        return self._adamw.updates

    def reset_moments(self, *, updates: int) -> None:
        """Allocate zero moments with an update count; saved moments are copied into them."""
        self._adamw.reset(updates=updates)


def learning_rate(step: int, *, optimizer: Optimizer, max_steps: int) -> float:
    """Learning rate of a step, counted from 0; steps past the end use the last step's rate.

    Warm-up rises linearly and reaches the peak at step warmup_steps - 1. The decay reaches
    final_fraction of the peak at the last step.
    """
    peak = number(optimizer.learning_rate)
    warmup = optimizer.warmup_steps
    if step < warmup:
        return peak * (step + 1) / warmup
    start = _decay_start(optimizer, max_steps)
    final = number(optimizer.final_fraction)
    progress = min(1.0, max(0.0, (step - start) / max(1, max_steps - 1 - start)))
    match optimizer.schedule:
        case "Constant":
            return peak
        case "Linear" | "WarmupStableDecay":
            return peak * (1 - (1 - final) * progress)
        case "Cosine":
            return peak * (final + (1 - final) * (1 + math.cos(math.pi * progress)) / 2)


def _decay_start(optimizer: Optimizer, max_steps: int) -> int:
    """Last step that still has the peak rate."""
    warm = max(0, optimizer.warmup_steps - 1)
    if optimizer.schedule != "WarmupStableDecay":
        return warm
    return max(warm, int(number(optimizer.decay_start) * max_steps))
