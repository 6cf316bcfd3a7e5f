"""AdamW with fp32 masters, and the one place where weights change."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from etude.common.api.meta import number
from etude.common.api.phases import Phase
from etude.trainer.batches import NonFiniteLossError
from etude.trainer.policy import Policy
from etude.trainer.ranks import parameters_by_name, whole
from etude.trainer.schedule import learning_rate

MOMENTS = ("exp_avg", "exp_avg_sq")


class Update(NamedTuple):
    """What one optimiser step did."""

    grad_norm: float
    learning_rate: float


class Optimiser:
    """Steps of one phase on the parameters of one policy."""

    def __init__(self, policy: Policy, phase: Phase) -> None:
        self._parameters = parameters_by_name(policy)
        decayed = [p for p in self._parameters.values() if p.ndim > 1]
        spared = [p for p in self._parameters.values() if p.ndim <= 1]  # norms and biases
        self._adamw = torch.optim.AdamW([{"params": decayed}, {"params": spared}], fused=True)
        self.renew(phase)

    def renew(self, phase: Phase) -> None:
        """Take the settings of a phase; the moments stay."""
        self._phase = phase
        settings = phase.optimizer
        self._clip = number(settings.gradient_clip)
        decays = (number(settings.weight_decay), 0.0)
        for group, decay in zip(self._adamw.param_groups, decays, strict=True):
            group["betas"] = (number(settings.beta1), number(settings.beta2))
            group["weight_decay"] = decay

    def rate(self, step: int) -> float:
        """The learning rate of a step of the phase."""
        return learning_rate(step, optimizer=self._phase.optimizer, max_steps=self._phase.max_steps)

    def apply(self, *, step: int, loss: float) -> Update:
        """Clip the gradient and follow it; collective.

        Args:
            step: of the phase, from 0.
            loss: of the whole batch.

        Raises:
            NonFiniteLossError: the loss or the gradient is NaN or infinite; no weight changed.
        """
        gradient = torch.nn.utils.get_total_norm(
            [p.grad for p in self._parameters.values() if p.grad is not None]
        )
        norm = float(whole(gradient))
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise NonFiniteLossError(
                f"phase {self._phase.name}, step {step}: loss {loss}, gradient norm {norm};"
                " the step was not applied"
            )
        rate = self.rate(step)
        for group in self._adamw.param_groups:
            group["lr"] = rate
        if norm > self._clip:
            for parameter in self._parameters.values():
                if parameter.grad is not None:
                    parameter.grad.mul_(self._clip / norm)
        self._adamw.step()
        return Update(norm, rate)

    def moments(self) -> dict[str, Tensor]:
        """The moments by name, live and sharded as they are; none before the first update."""
        return {
            f"{moment}.{name}": self._adamw.state[parameter][moment]
            for name, parameter in self._parameters.items()
            for moment in MOMENTS
            if parameter in self._adamw.state
        }

    @property
    def updates(self) -> int:
        """How many updates the moments have seen."""
        counts = {int(state["step"]) for state in self._adamw.state.values()}
        return max(counts, default=0)

    def prepare(self, *, updates: int) -> None:
        """Make moments of zeros that have seen so many updates, for saved ones to be put in."""
        self._adamw.state.clear()
        for parameter in self._parameters.values() if updates else ():
            self._adamw.state[parameter] = {
                "step": torch.tensor(float(updates), device=parameter.device),
                **{moment: torch.zeros_like(parameter.detach()) for moment in MOMENTS},
            }
