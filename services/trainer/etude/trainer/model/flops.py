"""Floating-point operations of a training step, from the model's shape.

A multiplication with an addition counts as two. A backward pass costs twice its forward pass;
recomputed activations are not counted, as is usual for model FLOPs utilisation.
Source: https://arxiv.org/abs/2204.02311, appendix B.
"""

from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from etude.trainer.model.experts.expert_parallel import count_experts

_PASSES = 3
"""One forward, and a backward of twice the cost: for activations, and for weights if trained."""
_PEAKS = {
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2_250e12,
    "GB200": 2_250e12,
    "A100": 312e12,
    "L40S": 362e12,
    "MI300X": 1_307e12,
}
"""Dense bf16 operations per second by the name of the device, from the vendors' data sheets."""


class SequenceCost(NamedTuple):
    """Operations of training on one sequence of length l: linear * l + quadratic * l^2."""

    linear: float = 1.0
    """Matrix products with parameters."""
    quadratic: float = 0.0
    """Causal attention."""

    def of(self, length: int) -> float:
        """Operations of a sequence."""
        return self.linear * length + self.quadratic * length * length


BY_TOKENS = SequenceCost()
"""Cost by number of tokens alone, for a model of unknown shape."""


def sequence_cost(model: PreTrainedModel) -> SequenceCost:
    """Cost of training a sequence, all tokens through the output layer; shards count whole."""
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    # Latent attention has keys and values of other sizes.
    sizes = [getattr(config, name, None) or size for name in ("qk_head_dim", "v_head_dim")]
    # Query times key, and weights times value: 2 * l * l * size a head each, half of it causal.
    attention = sum(sizes) * heads * config.num_hidden_layers
    is_frozen = not any(parameter.requires_grad for parameter in model.parameters())
    passes = _PASSES - 1 if is_frozen else _PASSES
    return SequenceCost(passes * 2 * _active_parameters(model), _PASSES * attention)


def peak_operations(device: torch.device) -> float | None:
    """Dense bf16 operations per second of a known GPU; None on CPUs and unknown devices."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for known, peak in _PEAKS.items() if known in name), None)


def _active_parameters(model: PreTrainedModel) -> float:
    """Parameters that take part in one token's matrix products."""
    config = model.config.get_text_config()
    experts = count_experts(config)
    chosen = getattr(config, "num_experts_per_tok", None)
    share = chosen / experts if experts and chosen else 1.0
    head = model.get_output_embeddings().weight
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    looked_up = {id(p) for table in tables for p in table.parameters()}
    total = float(head.numel())
    for name, parameter in model.named_parameters():
        # Norms and biases are in no matrix product.
        if parameter is head or parameter.ndim < 2 or id(parameter) in looked_up:
            continue
        total += parameter.numel() * (share if ".experts." in name else 1.0)
    return total
