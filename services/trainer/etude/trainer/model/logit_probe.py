"""Logit probe: finds how an architecture changes its logits after the output layer.

A copy of the model without blocks and with a small vocabulary says it in milliseconds, before any
weight is read. The configuration names the constants; the probe tells which of them are used.
"""

import copy
import itertools
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from etude.trainer.model.output_head import LogitTransform

_FACTORS = ("logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier")
_CAPS = ("final_logit_softcapping", "logits_soft_cap")
_VOCABULARY = 64
_SPREAD = 4.0
"""Standard deviation of the logits: large enough for a cap to show."""


def backbone(model: PreTrainedModel) -> nn.Module:
    """The part of a causal language model that computes hidden states."""
    base: nn.Module = model.base_model
    # Some causal models name another class's prefix as theirs (Llama 4), so that base is the model.
    return model.get_submodule("model") if base is model else base


def find_logit_transform(config: PretrainedConfig) -> LogitTransform:
    """Find the transform by which hidden states give the model's own logits.

    Raises:
        ValueError: no transform of the supported kinds does, or the model cannot be built.
    """
    try:
        hidden, expected, head = _probe(config)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError) as cause:
        raise ValueError(f"its logits cannot be checked: {cause}") from cause
    with torch.no_grad():
        raw = head(hidden)
    for transform in _candidates(config.get_text_config()):
        if torch.allclose(transform.apply(raw), expected, rtol=1e-4, atol=1e-4):
            return transform
    raise ValueError(
        f"{config.model_type} changes its logits after the output layer in an unsupported way"
    )


def _probe(config: PretrainedConfig) -> tuple[Tensor, Tensor, nn.Module]:
    """Hidden states, the logits that the architecture makes of them, and its output layer."""
    small = copy.deepcopy(config)
    text = small.get_text_config()
    text.vocab_size = _VOCABULARY
    text.num_hidden_layers = 0
    if getattr(text, "layer_types", None):
        text.layer_types = []
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(text, name, None)  # they may lie outside the small vocabulary
    token_ids = torch.arange(8)[None]
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(small, dtype=torch.float32).eval()
        head: nn.Module = model.get_output_embeddings()
        weight: Tensor = head.weight  # type: ignore[assignment]  # a layer with a weight
        weight.normal_(std=_SPREAD / weight.shape[1] ** 0.5)
        hidden = backbone(model)(input_ids=token_ids, use_cache=False).last_hidden_state
        logits = model(input_ids=token_ids, use_cache=False).logits
    return hidden, logits, head


def _candidates(config: PretrainedConfig) -> Iterator[LogitTransform]:
    constants = [float(v) for name in _FACTORS if (v := getattr(config, name, None))]
    factors = [1.0, *constants, *(1 / value for value in constants)]
    caps = [None, *(float(v) for name in _CAPS if (v := getattr(config, name, None)))]
    return itertools.starmap(LogitTransform, itertools.product(factors, caps))
