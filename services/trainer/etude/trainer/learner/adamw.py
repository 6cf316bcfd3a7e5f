"""AdamW of some parameters at a time, bit for bit what torch.optim.AdamW does with all of them."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from etude.trainer.model.parameters import local_shard

MOMENTS = ("exp_avg", "exp_avg_sq")

State = dict[str, Tensor]


class AdamW:
    """Moments of named parameters, and the update that follows them; fused kernels, fp32."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], *, moments: torch.dtype = torch.float32
    ) -> None:
        """Begin without moments.

        Args:
            parameters: by name.
            moments: number format in which moments are kept; updates are computed in fp32.
        """
        self._parameters = dict(parameters)
        self._moments = moments
        self.state: dict[str, State] = {}
        """By parameter, since its first update: step, exp_avg, exp_avg_sq, sharded as it is."""

    @torch.no_grad()
    def update(
        self,
        names: Sequence[str],
        *,
        rate: float,
        betas: tuple[float, float],
        weight_decay: float,
        epsilon: float,
    ) -> None:
        """Update these parameters by their gradients; one without a gradient stays as it is.

        Source: Decoupled weight decay regularization, https://arxiv.org/abs/1711.05101.
        """
        narrow = self._moments != torch.float32
        # fp32 copies of narrow moments are of one parameter at a time.
        for group in [[name] for name in names] if narrow else [names]:
            self._update_group(
                group, rate=rate, betas=betas, weight_decay=weight_decay, epsilon=epsilon
            )

    def _update_group(
        self,
        names: Sequence[str],
        *,
        rate: float,
        betas: tuple[float, float],
        weight_decay: float,
        epsilon: float,
    ) -> None:
        columns: list[list[Tensor]] = [[], [], [], [], []]
        for name in names:
            parameter = self._parameters[name]
            if parameter.grad is None:
                continue
            state = self._state_of(name)
            row = (parameter, parameter.grad, *(state[moment] for moment in MOMENTS))
            for column, tensor in zip(columns, (*row, state["step"]), strict=True):
                column.append(local_shard(tensor.detach()))
        parameters, gradients, averages, squares, steps = columns
        kept = (*averages, *squares)
        averages = [average.float() for average in averages]
        squares = [square.float() for square in squares]
        adamw(
            parameters,
            gradients,
            averages,
            squares,
            [],
            steps,
            fused=True,
            amsgrad=False,
            beta1=betas[0],
            beta2=betas[1],
            lr=rate,
            weight_decay=weight_decay,
            eps=epsilon,
            maximize=False,
        )
        for target, value in zip(kept, (*averages, *squares), strict=True):
            if target is not value:
                target.copy_(value)

    def reset(self, *, updates: int) -> None:
        """Allocate zero moments with an update count; saved moments are copied into them."""
        self.state.clear()
        for name in self._parameters if updates else ():
            self._state_of(name)["step"].fill_(updates)

    @property
    def updates(self) -> int:
        return max((int(state["step"]) for state in self.state.values()), default=0)

    def _state_of(self, name: str) -> State:
        if name not in self.state:
            parameter = self._parameters[name].detach()
            moments = {
                moment: torch.zeros_like(parameter, dtype=self._moments) for moment in MOMENTS
            }
            step = torch.zeros((), dtype=torch.float32, device=parameter.device)
            self.state[name] = {"step": step, **moments}
        return self.state[name]
