"""Export of the model as a Hugging Face folder."""

import json
from pathlib import Path

import torch
from torch import Tensor

from etude.common.blobs import ObjectInfo, Store
from etude.common.weights import Tensor as WireTensor
from etude.common.weights.tensors import model_folder
from etude.trainer.model import checkpoint_layout, tensor_bits
from etude.trainer.model.fsdp import RankGroup
from etude.trainer.model.parameters import gather_full
from etude.trainer.model.policy import Policy


def to_wire_tensor(name: str, tensor: Tensor) -> WireTensor:
    """Convert a complete tensor to named bytes."""
    data = tensor.detach().contiguous().cpu()
    return WireTensor(
        name=name,
        dtype=tensor_bits.NAMES[data.dtype],
        shape=tuple(data.shape),
        data=data.reshape(-1).view(torch.uint8).numpy().tobytes(),
    )


def gather_published_tensors(
    policy: Policy, ranks: RankGroup, *, dtype: tensor_bits.Dtype
) -> list[WireTensor]:
    """Gather every tensor of the model on rank 0; other ranks get none. Collective."""
    complete: dict[str, Tensor] = {}
    for name, tensor in checkpoint_layout.live_tensors(policy.model).items():
        value = gather_full(tensor)
        if ranks.is_first:
            complete[name] = value.to(tensor_bits.wire_dtype(value, dtype=dtype))
    if not ranks.is_first:
        return []
    # Some architectures fuse tensors when they load; the checkpoint's own layout is published.
    named = checkpoint_layout.to_checkpoint_tensors(policy.model, complete)
    return [to_wire_tensor(name, tensor) for name, tensor in sorted(named.items())]


def write_hf_folder(
    store: Store, prefix: str, *, policy: Policy, tensors: list[WireTensor], source: Path
) -> list[ObjectInfo]:
    """Write a Hugging Face model folder below prefix: weights, configuration, tokenizer."""
    files = dict(model_folder.weight_files(tensors))
    dtype = "bfloat16" if tensors[0].dtype == "BF16" else "float32"
    config = policy.config.to_dict() | {"dtype": dtype}
    files["config.json"] = (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()
    files |= {path.name: path.read_bytes() for path in model_folder.other_files(source)}
    for name, data in files.items():
        store.put(f"{prefix}/{name}", data)
    return [ObjectInfo(f"{prefix}/{name}", len(data)) for name, data in files.items()]
