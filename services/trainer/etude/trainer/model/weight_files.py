"""Weight files of a Hugging Face folder, in a local folder or an object store: read by range."""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from etude.common.blobs import MissingError, Range, RangeReader, Store
from etude.common.errors import CorruptError
from etude.common.weights.tensors import safetensors
from etude.common.weights.tensors.safetensors import StoredTensor

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_INDEX_BYTES = 64 << 20
READ_BYTES = 16 << 20
"""Longest range of one request."""


class StoredWeight(NamedTuple):
    """A tensor, and the object that holds it."""

    key: str
    tensor: StoredTensor


class ByteRange(NamedTuple):
    """A part of the data of a tensor."""

    weight: StoredWeight
    start: int
    """First byte, counted from the tensor's first."""
    length: int


def find_weights(store: Store) -> dict[str, StoredWeight] | None:
    """Find all tensors of a folder by the headers of its files; None if it has no such files.

    Raises:
        CorruptError: a file is damaged, or the index does not fit the files.
        StoreError: the store failed.
    """
    if store.head(SINGLE) is not None:
        return {each.tensor.name: each for each in _read_file(store, SINGLE)}
    listed = _read_index(store)
    if listed is None:
        return None
    found: dict[str, StoredWeight] = {}
    for key in sorted(set(listed.values())):
        for each in _read_file(store, key):
            if listed.get(each.tensor.name) == key:
                found[each.tensor.name] = each
    for name in sorted(listed.keys() - found.keys()):
        raise CorruptError(f"{store.url}/{listed[name]}: tensor {name!r} of {INDEX} is missing")
    return found


def read_ranges(store: Store, ranges: Iterable[ByteRange]) -> Iterator[tuple[int, int, memoryview]]:
    """Read parts of tensors, in the order of arrival.

    Returns:
        Number of the range, first byte in it, and data; a long range comes in several parts.

    Raises:
        StoreError: the store failed.
    """
    owners: dict[Range, list[tuple[int, int]]] = {}
    for number, (weight, start, length) in enumerate(ranges):
        for offset in range(0, length, READ_BYTES):
            size = min(READ_BYTES, length - offset)
            request = Range(weight.key, weight.tensor.start + start + offset, size)
            owners.setdefault(request, []).append((number, offset))
    for answer in RangeReader(store).read(owners):
        for number, offset in owners[answer.range]:
            yield number, offset, answer.data


def _read_file(store: Store, key: str) -> list[StoredWeight]:
    where = f"{store.url}/{key}"
    info = store.head(key)
    if info is None:
        raise CorruptError(f"{where}: is missing")
    prefix = store.get_range(key, 0, min(8, info.size))
    size = safetensors.header_bytes(prefix, where=where)
    header = store.get_range(key, 0, min(size, info.size))
    return [
        StoredWeight(key, tensor)
        for tensor in safetensors.list_tensors(header, info.size, where=where)
    ]


def _read_index(store: Store) -> Mapping[str, str] | None:
    where = f"{store.url}/{INDEX}"
    info = store.head(INDEX)
    if info is None:
        return None
    if info.size > MAX_INDEX_BYTES:
        raise CorruptError(f"{where}: {info.size} bytes, more than {MAX_INDEX_BYTES}")
    try:
        content = json.loads(store.get(INDEX))
    except (ValueError, RecursionError, MissingError) as cause:
        raise CorruptError(f"{where}: is no JSON: {cause}") from cause
    listed = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(listed, dict) or not all(isinstance(key, str) for key in listed.values()):
        raise CorruptError(f"{where}: has no weight_map of names")
    return listed
