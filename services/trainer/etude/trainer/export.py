"""The model as a Hugging Face folder."""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from etude.common.blobs import ObjectInfo, Store
from etude.common.weights import Tensor as WireTensor
from etude.common.weights import safetensors
from etude.trainer import layout, wire
from etude.trainer.policy import Policy
from etude.trainer.ranks import Ranks, whole

_PART_BYTES = 2 << 30
"""Size of one file of an exported model; Hugging Face's readers take any."""

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".index.json")
"""Files of the source folder that an export replaces or must not carry on."""


def wire_tensor(name: str, tensor: Tensor) -> WireTensor:
    """A complete tensor as named bytes."""
    data = tensor.detach().contiguous().cpu()
    return WireTensor(
        name=name,
        dtype=wire.NAMES[data.dtype],
        shape=tuple(data.shape),
        data=data.reshape(-1).view(torch.uint8).numpy().tobytes(),
    )


def published_tensors(policy: Policy, ranks: Ranks, *, dtype: wire.Dtype) -> list[WireTensor]:
    """Every tensor of the model, complete, on rank 0; nothing elsewhere. Collective."""
    complete: dict[str, Tensor] = {}
    for name, tensor in layout.sources(policy.model).items():
        value = whole(tensor)
        if ranks.is_first:
            complete[name] = value.to(wire.format_of(value, dtype=dtype))
    if not ranks.is_first:
        return []
    # Some architectures fuse tensors when they load; the checkpoint's own layout is published.
    named = layout.converted(policy.model, complete)
    return [wire_tensor(name, tensor) for name, tensor in sorted(named.items())]


def export(
    store: Store, prefix: str, *, policy: Policy, tensors: list[WireTensor], source: Path
) -> list[ObjectInfo]:
    """Write a Hugging Face model folder below prefix: weights, configuration, tokenizer.

    Args:
        store: where to.
        prefix: key of the folder, without a slash at the end.
        policy: whose configuration is written.
        tensors: what published_tensors gave.
        source: the folder that the run started from; its tokenizer files are copied.
    """
    files = dict(_weight_files(tensors))
    dtype = "bfloat16" if tensors[0].dtype == "BF16" else "float32"
    config = policy.config.to_dict() | {"dtype": dtype}
    files["config.json"] = (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()
    for path in sorted(source.iterdir()):
        if path.is_file() and path.name not in files and not path.name.endswith(_WEIGHT_SUFFIXES):
            files[path.name] = path.read_bytes()
    for name, data in files.items():
        store.put(f"{prefix}/{name}", data)
    return [ObjectInfo(f"{prefix}/{name}", len(data)) for name, data in files.items()]


def _weight_files(tensors: list[WireTensor]) -> Iterator[tuple[str, bytes]]:
    parts: list[list[WireTensor]] = [[]]
    for tensor in tensors:
        if parts[-1] and sum(t.num_bytes for t in parts[-1]) + tensor.num_bytes > _PART_BYTES:
            parts.append([])
        parts[-1].append(tensor)
    if len(parts) == 1:
        yield "model.safetensors", safetensors.encode(parts[0])
        return
    where: dict[str, str] = {}
    for index, part in enumerate(parts, start=1):
        name = f"model-{index:05d}-of-{len(parts):05d}.safetensors"
        where |= {tensor.name: name for tensor in part}
        yield name, safetensors.encode(part)
    body = {
        "metadata": {"total_size": sum(t.num_bytes for t in tensors)},
        "weight_map": where,
    }
    yield "model.safetensors.index.json", json.dumps(body, indent=2).encode()
