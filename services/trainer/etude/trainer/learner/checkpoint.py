"""Checkpoint of the learner: complete state in the object store, free of pickles.

Layout below the prefix: <part>-<digest>.safetensors, then index.json, sealed, which names every
part with its size and BLAKE3 and carries what is no tensor. Parts hold complete tensors, so any
number of ranks can read what any other number wrote. (torch.distributed.checkpoint keeps its
index as a pickle, which a store that others can write to must not be trusted with.)
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from blake3 import blake3
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError
from torch import Tensor

from etude.common.blobs import MissingError, ObjectInfo, Store
from etude.common.errors import CorruptError
from etude.common.weights import Tensor as WireTensor
from etude.common.weights.protocol import records
from etude.common.weights.tensors import safetensors

PART_BYTES = 256 << 20
"""Size at which a part is closed; encoding takes that much beside the state itself."""

_TORCH = {"F32": torch.float32, "BF16": torch.bfloat16, "U8": torch.uint8, "I64": torch.int64}


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: str = Field(pattern=r"^[0-9]{4}-[0-9a-f]{16}\.safetensors$")
    size: int = Field(ge=8)
    blake3: str = Field(pattern=r"^[0-9a-f]{64}$")


class _Index(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: int = Field(ge=1, le=1)
    parts: list[_Part] = Field(min_length=1)
    tensors: int = Field(ge=1)
    state: dict[str, JsonValue]


class SavedState(NamedTuple):
    """A state that was read back."""

    tensors: dict[str, Tensor]
    state: dict[str, JsonValue]


def write_state(
    store: Store, prefix: str, *, tensors: Iterable[WireTensor], state: Mapping[str, JsonValue]
) -> list[ObjectInfo]:
    """Save tensors and state below prefix; the index comes last.

    Returns:
        Every object written.
    """
    parts: list[_Part] = []
    count = 0
    for index, part in enumerate(_split_parts(tensors)):
        data = safetensors.encode(part)
        digest = blake3(data).hexdigest()
        name = f"{index:04d}-{digest[:16]}.safetensors"
        store.put(f"{prefix}/{name}", data)
        parts.append(_Part(name=name, size=len(data), blake3=digest))
        count += len(part)
    index_bytes = records.seal(
        _Index(format=1, parts=parts, tensors=count, state=dict(state)).model_dump()
    )
    store.put(f"{prefix}/index.json", index_bytes)
    return [
        *(ObjectInfo(f"{prefix}/{part.name}", part.size) for part in parts),
        ObjectInfo(f"{prefix}/index.json", len(index_bytes)),
    ]


def _split_parts(tensors: Iterable[WireTensor]) -> Iterator[list[WireTensor]]:
    part: list[WireTensor] = []
    size = 0
    for tensor in tensors:
        if part and size + tensor.num_bytes > PART_BYTES:
            yield part
            part, size = [], 0
        part.append(tensor)
        size += tensor.num_bytes
    if part:
        yield part


def read_state(store: Store, prefix: str) -> SavedState:
    """Read and verify everything that was saved below prefix.

    Raises:
        CorruptError: an object is missing or damaged; it is named.
    """
    index = _read_index(store, prefix)
    tensors: dict[str, Tensor] = {}
    for part in index.parts:
        key = f"{prefix}/{part.name}"
        where = f"{store.url}/{key}"
        data = _get(store, key)
        if len(data) != part.size:
            raise CorruptError(f"{where}: {len(data)} bytes, the index says {part.size}")
        if blake3(data).hexdigest() != part.blake3:
            raise CorruptError(f"{where}: content does not match its BLAKE3 digest")
        for tensor in safetensors.decode(data, where=where):
            tensors[tensor.name] = _torch_tensor(tensor)
    if len(tensors) != index.tensors:
        raise CorruptError(f"{store.url}/{prefix}: {len(tensors)} tensors, not {index.tensors}")
    return SavedState(tensors, index.state)


def check_fit(saved: Mapping[str, Tensor], expected: Mapping[str, Tensor], *, where: str) -> None:
    """Refuse tensors of another model before any of them is used.

    Raises:
        CorruptError: a tensor is missing, left over or of another shape.
    """
    for name in sorted(saved.keys() ^ expected.keys()):
        raise CorruptError(
            f"{where}: tensor {name!r} is {'missing' if name in expected else 'not of this model'}"
        )
    for name, tensor in expected.items():
        if saved[name].shape != tensor.shape or saved[name].dtype != tensor.dtype:
            raise CorruptError(
                f"{where}: tensor {name!r} is {saved[name].dtype}{list(saved[name].shape)},"
                f" the model has {tensor.dtype}{list(tensor.shape)}"
            )


def _torch_tensor(tensor: WireTensor) -> Tensor:
    if tensor.num_bytes == 0:
        return torch.empty(tensor.shape, dtype=_TORCH[tensor.dtype])
    flat = torch.frombuffer(bytearray(tensor.data), dtype=_TORCH[tensor.dtype])
    return flat.reshape(tensor.shape)


def _read_index(store: Store, prefix: str) -> _Index:
    key = f"{prefix}/index.json"
    where = f"{store.url}/{key}"
    try:
        return _Index.model_validate(records.unseal(_get(store, key), where=where))
    except ValidationError as cause:
        raise CorruptError(f"{where}: {cause}") from cause


def _get(store: Store, key: str) -> bytes:
    try:
        return store.get(key)
    except MissingError as cause:
        raise CorruptError(f"{store.url}/{key}: missing") from cause
