"""Sharded load: each rank reads the bytes of its own shards, and holds no more of the model.

The model is built without memory, sharded, and given memory for this rank's shards; then their
elements are read from the weight files by range. Buffers that no file has are computed again.
"""

import itertools
import logging
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from etude.common.blobs import Store
from etude.common.weights.tensors.safetensors import ITEM_BYTES
from etude.trainer.model import checkpoint_layout, tensor_bits
from etude.trainer.model.checkpoint_layout import CheckpointLayout
from etude.trainer.model.fsdp import RankGroup
from etude.trainer.model.mtp.heads import attach_heads
from etude.trainer.model.parameters import local_shard
from etude.trainer.model.shard_runs import runs_of_shard
from etude.trainer.model.weight_files import ByteRange, StoredWeight, read_ranges

log = logging.getLogger(__name__)


class ScatteredLayoutError(ValueError):
    """The checkpoint stores tensors in an order that cannot be read in parts."""


class LoadPlan(NamedTuple):
    """The stored tensors that a model is filled from."""

    layout: CheckpointLayout
    weights: dict[str, StoredWeight]
    """By the tensor's name in the layout."""


class _Placed(NamedTuple):
    """Elements of a stored tensor that go to consecutive places of a shard."""

    weight: StoredWeight
    first: int
    """In the stored tensor."""
    source: str
    place: int
    """In the shard."""
    length: int


def build_blank_model(config: PretrainedConfig) -> PreTrainedModel:
    """Build a model of the configuration without memory for its tensors."""
    model: PreTrainedModel
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="sdpa"
        )
        attach_heads(model)
    return model


def plan_load(model: PreTrainedModel, weights: Mapping[str, StoredWeight]) -> LoadPlan:
    """Match stored tensors with those of a model.

    Raises:
        ScatteredLayoutError: a tensor is stored in an order that cannot be read in parts.
        ValueError: a tensor is missing, misshapen or of an unknown format; nothing was allocated.
    """
    targets = _rename(model, weights)
    layout = checkpoint_layout.trace_layout(model, dtype="Float32", grid=1)
    if layout.scattered:
        raise ScatteredLayoutError(
            "the checkpoint's layout scatters tensors, which cannot be read in parts:"
            f" {', '.join(layout.scattered[:5])}"
        )
    renamed = {target: name for name, target in targets.items()}
    sources = {p.tensor: p.source for pieces in layout.pieces.values() for p in pieces}
    found: dict[str, StoredWeight] = {}
    faulty: list[str] = []
    for spec in layout.schema.tensors:
        # A tensor that is only renamed may be stored under an older name.
        weight = weights.get(spec.name) or weights.get(renamed.get(sources[spec.name], ""))
        if weight is None or weight.tensor.shape != spec.shape:
            faulty.append(spec.name)
        elif weight.tensor.dtype not in tensor_bits.DTYPES:
            raise ValueError(f"tensor {spec.name} has format {weight.tensor.dtype}")
        else:
            found[spec.name] = weight
    if faulty:
        raise ValueError(f"missing or misshapen tensors: {', '.join(sorted(faulty)[:5])}")
    unused = len(weights) - len({weight.tensor.name for weight in found.values()})
    if unused:
        log.warning("%d tensors of the weight files are not of this model", unused)
    return LoadPlan(layout, found)


def allocate(module: nn.Module, ranks: RankGroup) -> None:
    """Give the tensors of a module memory, each shard its own; the content is arbitrary."""
    # Not by to_empty(), which parts tied tensors and cannot exchange those without values.
    allocated: dict[int, nn.Parameter] = {}
    for each in module.modules():
        for name, parameter in each.named_parameters(recurse=False):
            if id(parameter) not in allocated:
                memory = torch.empty_like(parameter, device=ranks.weight_device)
                allocated[id(parameter)] = nn.Parameter(
                    memory, requires_grad=parameter.requires_grad
                )
            setattr(each, name, allocated[id(parameter)])
        for name, buffer in each.named_buffers(recurse=False):
            setattr(each, name, torch.empty_like(buffer, device=ranks.device))
    for each in module.modules():
        if isinstance(each, FSDPModule):
            # FSDP looks up the new shards.
            each._apply(lambda tensor: tensor, recurse=False)  # type: ignore[no-untyped-call]


def move_buffers(module: nn.Module, device: torch.device) -> None:
    """Move buffers alone: FSDP copies offloaded parameters to the device, block by block."""
    for each in module.modules():
        for name, buffer in each.named_buffers(recurse=False):
            setattr(each, name, buffer.to(device))


def fill(model: PreTrainedModel, plan: LoadPlan, store: Store) -> None:
    """Read the elements of this rank's shards into a model that has memory.

    Raises:
        StoreError: the store failed.
    """
    shards = {
        name: (local_shard(tensor.detach()).reshape(-1), runs_of_shard(tensor))
        for name, tensor in checkpoint_layout.live_tensors(model).items()
    }
    placed = [
        _Placed(plan.weights[piece.tensor], piece.first, source, place, piece.length)
        for source, pieces in plan.layout.pieces.items()
        for piece, place in checkpoint_layout.cut_pieces(pieces, shards[source][1])
    ]
    ranges = [_byte_range(each) for each in placed]
    for number, offset, data in read_ranges(store, ranges):
        each = placed[number]
        dtype = tensor_bits.DTYPES[each.weight.tensor.dtype]
        values = torch.frombuffer(bytearray(data), dtype=dtype)
        place = each.place + offset // dtype.itemsize
        shards[each.source][0][place : place + values.numel()].copy_(values)


@torch.no_grad()
def restore_buffers(model: PreTrainedModel) -> None:
    """Compute the buffers that no checkpoint has, as the architecture does.

    Raises:
        ValueError: the architecture leaves one as it is.
    """
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        tensor._is_hf_initialized = True  # the mark of transformers
    blank = dict(model.named_non_persistent_buffers())
    for name, buffer in blank.items():
        buffer._is_hf_initialized = False
        buffer.fill_(torch.nan if buffer.is_floating_point() else 0)
        owner = model.get_submodule(name.rpartition(".")[0])
        owner._is_hf_initialized = False
    model.initialize_weights()
    for name, buffer in model.named_non_persistent_buffers():
        if buffer.is_floating_point() and buffer.isnan().any():
            raise ValueError(f"buffer {name} is in no checkpoint and is not computed by the model")


def _rename(model: PreTrainedModel, weights: Mapping[str, StoredWeight]) -> dict[str, str]:
    """Name in the model of each stored tensor, as transformers maps them.

    The conversions that apply to these files are attached to the model, so that its checkpoint
    layout is theirs.
    """
    conversions = get_model_conversion_mapping(model)
    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    known = model.state_dict()
    targets: dict[str, str] = {}
    for name in sorted(weights):
        target, _ = rename_source_key(name, renamings, converters, model.base_model_prefix, known)
        if target not in known and name in known:
            target = name
        targets[name] = target
    model._weight_conversions = [each for each in conversions if each.was_used()]
    return targets


def _byte_range(each: _Placed) -> ByteRange:
    item = ITEM_BYTES[each.weight.tensor.dtype]
    return ByteRange(each.weight, each.first * item, each.length * item)
