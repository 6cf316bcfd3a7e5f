"""Export of the model as a Hugging Face folder, tensor by tensor."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from etude.common.blobs import ObjectInfo, Store
from etude.common.weights import Tensor as WireTensor
from etude.common.weights.tensors import model_folder
from etude.common.weights.tensors.schema import TensorSpec
from etude.trainer.model import checkpoint_layout, tensor_bits
from etude.trainer.model.checkpoint_layout import CheckpointLayout, LayoutPiece
from etude.trainer.model.fsdp import RankGroup
from etude.trainer.model.parameters import gather_full
from etude.trainer.model.policy import Policy

FILE_BYTES = 1 << 30
"""Size of a file of weights, which is in memory beside the tensor that is gathered."""


class FolderTensors(NamedTuple):
    """The tensors of a model folder."""

    specs: list[TensorSpec]
    """In the order of the tensors."""
    tensors: Iterator[WireTensor]


def write_hf_folder(
    store: Store,
    prefix: str,
    *,
    policy: Policy,
    ranks: RankGroup,
    dtype: tensor_bits.Dtype,
    source: Path,
) -> list[ObjectInfo]:
    """Write a Hugging Face model folder below prefix: weights, configuration, tokenizer.

    Collective. One tensor is complete at a time, besides those that the layout scatters.

    Returns:
        The objects that rank 0 wrote; none on other ranks.

    Raises:
        StoreError: the store failed.
    """
    gathered = gather_sources(policy)
    if not ranks.is_first:
        for _ in gathered:
            pass
        return []
    try:
        contents = convert_tensors(policy, gathered, dtype=dtype)
        files = _folder_files(policy, contents, source=source)
        return [_store_file(store, f"{prefix}/{name}", data) for name, data in files]
    finally:
        # A store that fails midway must not leave other ranks waiting.
        for _ in gathered:
            pass


def gather_sources(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    """Gather each live tensor of the model; collective, so every rank must take all of them."""
    for name, tensor in checkpoint_layout.live_tensors(policy.model).items():
        yield name, gather_full(tensor)


def convert_tensors(
    policy: Policy, gathered: Iterator[tuple[str, Tensor]], *, dtype: tensor_bits.Dtype
) -> FolderTensors:
    """Convert live tensors, as they come, to those of the checkpoint."""
    layout = checkpoint_layout.trace_layout(policy.model, dtype=dtype, grid=1)
    by_source = {
        source: _pieces_by_tensor(layout.pieces.get(source, []))
        for source in checkpoint_layout.live_tensors(policy.model)
    }
    # Scattered tensors follow once all are there.
    held = {name: None for each in by_source.values() for name in each}
    specs = {spec.name: spec for spec in layout.schema.tensors}
    ordered = [*held, *(name for name in specs if name not in held)]
    return FolderTensors(
        [specs[name] for name in ordered],
        _converted_tensors(policy, layout, by_source, gathered, dtype=dtype),
    )


def _converted_tensors(
    policy: Policy,
    layout: CheckpointLayout,
    by_source: Mapping[str, Mapping[str, list[LayoutPiece]]],
    gathered: Iterator[tuple[str, Tensor]],
    *,
    dtype: tensor_bits.Dtype,
) -> Iterator[WireTensor]:
    scattered: dict[str, Tensor] = {}
    for source, complete in gathered:
        value = complete.detach().to(tensor_bits.wire_dtype(complete, dtype=dtype))
        if source in layout.scattered:
            scattered[source] = value
        for name, pieces in by_source[source].items():
            spec = layout.schema.tensors[layout.schema.index[name]]
            yield _to_wire_tensor(name, _cut_out(value.reshape(-1), pieces, spec))
    if scattered:
        named = checkpoint_layout.to_checkpoint_tensors(policy.model, scattered)
        for spec in layout.schema.tensors:
            if spec.name in named:
                yield _to_wire_tensor(spec.name, named[spec.name])


def _pieces_by_tensor(pieces: list[LayoutPiece]) -> dict[str, list[LayoutPiece]]:
    by_tensor: dict[str, list[LayoutPiece]] = {}
    for piece in pieces:
        by_tensor.setdefault(piece.tensor, []).append(piece)
    return by_tensor


def _cut_out(flat: Tensor, pieces: list[LayoutPiece], spec: TensorSpec) -> Tensor:
    """The tensor of the checkpoint that the pieces of a flat source make up."""
    if len(pieces) == 1:
        first = pieces[0].start
        return flat[first : first + spec.elements].reshape(spec.shape)
    found = torch.empty(spec.elements, dtype=flat.dtype, device=flat.device)
    for piece in pieces:
        part = flat[piece.start : piece.start + piece.length]
        found[piece.first : piece.first + piece.length] = part
    return found.reshape(spec.shape)


def _to_wire_tensor(name: str, tensor: Tensor) -> WireTensor:
    """Convert a complete tensor to named bytes."""
    data = tensor.detach().contiguous().cpu()
    return WireTensor(
        name=name,
        dtype=tensor_bits.NAMES[data.dtype],
        shape=tuple(data.shape),
        data=data.reshape(-1).view(torch.uint8).numpy().tobytes(),
    )


def _folder_files(
    policy: Policy, contents: FolderTensors, *, source: Path
) -> Iterator[tuple[str, bytes]]:
    """Name and content of each file of the folder, one in memory at a time."""
    sizes = [spec.num_bytes for spec in contents.specs]
    yield from model_folder.weight_files(contents.tensors, sizes, part_bytes=FILE_BYTES)
    dtype = "bfloat16" if any(each.dtype == "BF16" for each in contents.specs) else "float32"
    config = policy.config.to_dict() | {"dtype": dtype}
    yield "config.json", (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()
    for path in model_folder.other_files(source):
        yield path.name, path.read_bytes()


def _store_file(store: Store, key: str, data: bytes) -> ObjectInfo:
    store.put(key, data)
    return ObjectInfo(key, len(data))
