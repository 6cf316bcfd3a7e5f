"""Replay of recorded expert ids in the routers of a mixture of experts.

Engine and trainer compute router logits in different arithmetic, so some tokens would take other
experts than where they were sampled. Weights always come from the trainer's own logits.
Shapes: B rows, T their length, M layers with experts, k choices of a token.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from etude.kernels.routing import Router, Scoring, route


class RouteShape(NamedTuple):
    """Recorded ids of one token."""

    layers: int
    """With experts."""
    choices: int


def _qwen3(config: PretrainedConfig) -> Router:
    return Router(renormalises=config.norm_topk_prob)


def _deepseek(config: PretrainedConfig) -> Router:
    return Router(
        scoring=Scoring.SIGMOID,
        renormalises=config.norm_topk_prob,
        scale=config.routed_scaling_factor,
        groups=config.n_group,
        chosen_groups=config.topk_group,
    )


_RULES: dict[str, Callable[[PretrainedConfig], Router]] = {
    "Qwen3MoeTopKRouter": _qwen3,
    "DeepseekV3TopkRouter": _deepseek,
}
"""By the class of the module, whose result is logits, weights and ids."""
_BIAS = "e_score_correction_bias"
"""Buffer of a router that is added to scores for the choice."""


class RouterReplay:
    """Makes the routers of one model take given experts."""

    def __init__(self, model: nn.Module, config: PretrainedConfig) -> None:
        """Hook into the routers of a model; a model without any is left as it is."""
        self._routes: Tensor | None = None
        self._chosen: dict[int, Tensor] | None = None
        """Experts that compute a pass by layer, replayed or not, while recorded. [B * T, k] each"""
        self.plausibility = 0.0
        """Least part of the k-th best live score that a replayed expert needs; see
        etude.kernels.routing.route()."""
        self.recomputes = False
        """True if the passes of a batch replay the experts of the first one."""
        self.shape: RouteShape | None = None
        """None if routes of this model cannot be replayed."""
        found = list(_routers(model))
        self.biases = tuple(
            f"model.{name}.{_BIAS}"
            for name, module in model.named_modules()
            if type(module).__name__ in _RULES and _BIAS in module._buffers
        )
        """Names in the policy of the buffers by which routers choose, by layer; none without."""
        for index, (module, rule) in enumerate(found):
            module.register_forward_hook(self._hook(index, rule(config), config))
        if found:
            self.shape = RouteShape(len(found), config.num_experts_per_tok)

    def replay(self, routes: Tensor | None) -> None:
        """Take these experts in every pass from now on, in recomputed ones too.

        Args:
            routes: ids of the tokens of the next pass; None for the live router. int [B, T, M, k]
        """
        self._routes = None if routes is None else routes.flatten(0, 1)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the experts of passes."""
        self._chosen = {}
        try:
            yield
        finally:
            self._chosen = None

    def last_choices(self) -> Tensor:
        """Experts of the tokens of the last pass that was recorded. [B * T, M, k]."""
        assert self._chosen is not None  # noqa: S101 - within recording()
        return torch.stack([self._chosen[index] for index in range(len(self._chosen))], dim=1)

    def _hook(
        self, index: int, router: Router, config: PretrainedConfig
    ) -> Callable[[nn.Module, object, tuple[Tensor, Tensor, Tensor]], object]:
        def take_routes(
            module: nn.Module, _: object, result: tuple[Tensor, Tensor, Tensor]
        ) -> object:
            logits, weights, ids = result
            if self._routes is not None:
                replayed = route(
                    logits,
                    k=config.num_experts_per_tok,
                    router=router,
                    bias=getattr(module, _BIAS, None),
                    replay=self._routes[:, index],
                    plausibility=self.plausibility,
                )
                weights, ids = replayed.weights.to(weights.dtype), replayed.ids.to(ids.dtype)
            if self._chosen is not None:
                self._chosen[index] = ids.detach()
            return logits, weights, ids

        return take_routes


def _routers(
    model: nn.Module,
) -> Iterator[tuple[nn.Module, Callable[[PretrainedConfig], Router]]]:
    for module in model.modules():
        rule = _RULES.get(type(module).__name__)
        if rule is not None:
            yield module, rule
