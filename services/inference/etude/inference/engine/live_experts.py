"""Expert layers of CPU engines that compute from the parameters that versions are written to.

vLLM's own CPU kernels take weights that were rearranged at load: a version written into the
parameters would be computed from in another order.
"""

from collections.abc import Callable
from typing import Any

import torch
from typing_extensions import override
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.oracle import unquantized
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend

from etude.kernels.experts import moe_experts
from etude.kernels.routing import Routes

_vllm_classes: Callable[[UnquantizedMoeBackend], list[type[Any]]] = (
    unquantized.backend_to_kernel_cls
)


def prefer_live_experts() -> None:
    """Let vLLM choose these experts on CPUs for every model that they can compute; repeatable."""
    unquantized.backend_to_kernel_cls = _experts_by_preference


def _experts_by_preference(backend: UnquantizedMoeBackend) -> list[type[Any]]:
    others = _vllm_classes(backend)
    return [LiveExperts, *others] if backend == UnquantizedMoeBackend.CPU else others


class LiveExperts(CPUUnquantizedExperts):  # type: ignore[misc]  # mypy does not follow vLLM
    """SwiGLU experts without biases, of any size, on one rank."""

    @override
    @staticmethod
    def is_supported_config(
        cls: type[Any],  # noqa: PLW0211 - vLLM's signature
        moe_config: FusedMoEConfig,
        weight_key: object,
        activation_key: object,
        activation_format: object,
    ) -> tuple[bool, str | None]:
        if moe_config.has_bias:
            return False, "live experts have no biases"
        supported: tuple[bool, str | None] = super(
            CPUUnquantizedExperts, LiveExperts
        ).is_supported_config(cls, moe_config, weight_key, activation_key, activation_format)
        return supported

    @override
    @staticmethod
    def _supports_activation(activation: MoEActivation) -> bool:
        return activation is MoEActivation.SILU

    @override
    @staticmethod
    def _supports_parallel_config(moe_parallel_config: FusedMoEParallelConfig) -> bool:
        return not moe_parallel_config.use_ep

    @override
    @classmethod
    def _padded_intermediate_size(cls, moe_config: FusedMoEConfig) -> int:
        size: int = moe_config.intermediate_size_per_partition
        return size

    @override
    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Leave the weights as they were loaded."""

    @override
    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        *_: object,
        apply_router_weight_on_input: bool = False,
        **__: object,
    ) -> None:
        if apply_router_weight_on_input:  # vLLM has multiplied the hidden states by them
            topk_weights = torch.ones_like(topk_weights)
        routes = Routes(topk_ids, topk_weights, topk_ids.new_zeros(()))
        output.copy_(moe_experts(hidden_states, routes=routes, gate_up=w1, down=w2))
