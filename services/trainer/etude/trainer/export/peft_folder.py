"""Export of adapters as a PEFT folder, which loads on top of the model that training began from."""

import json
from collections.abc import Mapping

import torch

from etude.common import hub_uri
from etude.common.api.run.roles import Lora
from etude.common.blobs import ObjectInfo, Store
from etude.common.weights.tensors import safetensors
from etude.common.weights.tensors.safetensors import Tensor
from etude.trainer.model import tensor_bits
from etude.trainer.model.fsdp import RankGroup
from etude.trainer.model.lora import named_adapters
from etude.trainer.model.policy import Policy

_PREFIX = "base_model.model."
"""Of PEFT's names before those of the model."""


def write_peft_folder(
    store: Store, prefix: str, *, policy: Policy, ranks: RankGroup, base_uri: str
) -> list[ObjectInfo]:
    """Write the adapters of a policy below prefix, on rank 0: every rank has all of them.

    The model that they change is loaded with config.json of this folder: a phase may have changed
    its positions.

    Args:
        store: to write to.
        prefix: of the folder.
        policy: perhaps without adapters: then nothing is written.
        ranks: of the policy.
        base_uri: of the model that they change, which readers are told.

    Raises:
        StoreError: the store failed.
    """
    settings = policy.lora
    if settings is None or not ranks.is_first:
        return []
    tensors = [
        Tensor(
            name=f"{_PREFIX}{layer}.{name}.weight",
            dtype="F32",
            shape=tuple(parameter.shape),
            data=tensor_bits.to_words(parameter, dtype=torch.float32).tobytes(),
        )
        for layer, adapter in named_adapters(policy.adapters)
        for name, parameter in adapter.named_parameters()
    ]
    files = {
        "adapter_model.safetensors": safetensors.encode(tensors),
        "adapter_config.json": _write_json(_describe_adapters(policy, settings, base_uri)),
        "config.json": _write_json(policy.config.to_dict()),
    }
    for name, data in files.items():
        store.put(f"{prefix}/{name}", data)
    return [ObjectInfo(f"{prefix}/{name}", len(data)) for name, data in files.items()]


def _describe_adapters(policy: Policy, settings: Lora, base_uri: str) -> dict[str, object]:
    """PEFT's own configuration."""
    config: dict[str, object] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_uri or None,
        "revision": None,
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": _target_modules(policy),
        "inference_mode": True,
    }
    if hub_uri.is_hub_uri(base_uri):
        source = hub_uri.parse_hub_uri(base_uri)
        config |= {"base_model_name_or_path": source.repository, "revision": source.revision}
    return config


def _write_json(content: Mapping[str, object]) -> bytes:
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()


def _target_modules(policy: Policy) -> list[str]:
    """Ends of the names of all layers with an adapter, or the names if others end alike."""
    layers = {layer for layer, _ in named_adapters(policy.adapters)}
    endings = sorted({layer.rpartition(".")[2] for layer in layers})
    modules = (name for name, _ in policy.model.named_modules())
    alike = {name for name in modules if any(f".{name}".endswith(f".{e}") for e in endings)}
    return endings if alike == layers else sorted(layers)
