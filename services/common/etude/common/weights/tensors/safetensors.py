"""The safetensors container, written and read without trusting a byte of it."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from typing_extensions import Buffer

from etude.common.errors import CorruptError

ITEM_BYTES = {
    "F64": 8,
    "I64": 8,
    "U64": 8,
    "F32": 4,
    "I32": 4,
    "U32": 4,
    "F16": 2,
    "BF16": 2,
    "I16": 2,
    "U16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
"""Bytes per element of each number format."""

MAX_HEADER_BYTES = 64 << 20
MAX_NAME_CHARS = 1_024
MAX_DIMS = 8
_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """One named array as raw little-endian bytes, row-major."""

    name: str
    dtype: str
    """A key of ITEM_BYTES."""
    shape: tuple[int, ...]
    data: Buffer

    def __post_init__(self) -> None:
        problem = _problem(self.name, self.dtype, self.shape, self.num_bytes)
        if problem:
            raise ValueError(f"tensor {self.name!r}: {problem}")

    @property
    def num_bytes(self) -> int:
        return memoryview(self.data).nbytes


def _problem(name: str, dtype: str, shape: tuple[int, ...], num_bytes: int) -> str:
    """Fault of a tensor's description; empty if there is none."""
    if not 0 < len(name) <= MAX_NAME_CHARS or name == "__metadata__":
        return f"a name has 1 to {MAX_NAME_CHARS} characters and is not __metadata__"
    if dtype not in ITEM_BYTES:
        return f"unknown dtype {dtype!r}"
    if len(shape) > MAX_DIMS:
        return f"more than {MAX_DIMS} dimensions"
    if not all(type(size) is int and 0 <= size < 1 << 48 for size in shape):
        return f"shape {shape!r} has a size that is no count"
    expected = math.prod(shape) * ITEM_BYTES[dtype]
    if expected != num_bytes:
        return f"{dtype}{list(shape)} takes {expected} bytes, not {num_bytes}"
    return ""


def encode(tensors: Sequence[Tensor]) -> bytes:
    """The tensors as one safetensors file, wide formats first so that all stay aligned.

    Raises:
        ValueError: no tensor, or a name twice.
    """
    if not tensors or len({tensor.name for tensor in tensors}) != len(tensors):
        raise ValueError("a container needs at least one tensor, and each name once")
    ordered = sorted(tensors, key=lambda tensor: (-ITEM_BYTES[tensor.dtype], tensor.name))
    header: dict[str, object] = {}
    offset = 0
    for tensor in ordered:
        end = offset + tensor.num_bytes
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    length = len(text).to_bytes(_LENGTH_BYTES, "little")
    return b"".join([length, text, *(memoryview(tensor.data).cast("B") for tensor in ordered)])


def decode(data: Buffer, *, where: str) -> list[Tensor]:
    """The tensors of a safetensors file, as views into it, in file order.

    Raises:
        CorruptError: truncated, overlapping, with holes, or describing what it does not hold.
    """
    view = memoryview(data).cast("B")
    return [
        Tensor(
            name=stored.name,
            dtype=stored.dtype,
            shape=stored.shape,
            data=view[stored.start : stored.start + stored.num_bytes],
        )
        for stored in list_tensors(view[: header_bytes(view, where=where)], len(view), where=where)
    ]


class StoredTensor(NamedTuple):
    """Description of a tensor in a file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    """First byte of its data in the file."""
    num_bytes: int


def header_bytes(data: Buffer, *, where: str) -> int:
    """Size of the header, from the first eight bytes of a file or more.

    Raises:
        CorruptError: the file is shorter, or the header larger than any.
    """
    view = memoryview(data).cast("B")
    if len(view) < _LENGTH_BYTES:
        raise CorruptError(f"{where}: {len(view)} bytes, too short for a header")
    length = int.from_bytes(view[:_LENGTH_BYTES], "little")
    if length > MAX_HEADER_BYTES:
        raise CorruptError(f"{where}: the header claims {length} bytes")
    return _LENGTH_BYTES + length


def list_tensors(header: Buffer, file_bytes: int, *, where: str) -> list[StoredTensor]:
    """Tensors of a file by its header alone, in file order.

    Args:
        header: the first header_bytes() of the file.
        file_bytes: size of the file.
        where: of the file, for errors.

    Raises:
        CorruptError: truncated, overlapping, with holes, or describing what it does not hold.
    """
    entries, start = _header(memoryview(header).cast("B"), where)
    found = []
    position = 0
    for entry in sorted(entries, key=lambda entry: (entry.begin, entry.end)):
        at = f"{where}: tensor {entry.name!r}"
        if entry.begin != position:
            raise CorruptError(f"{at}: data begins at {entry.begin}, not {position}")
        position = entry.end
        if start + position > file_bytes:
            raise CorruptError(f"{at}: data ends outside the file")
        num_bytes = entry.end - entry.begin
        try:
            problem = _problem(entry.name, entry.dtype, tuple(entry.shape), num_bytes)
        except TypeError as cause:
            raise CorruptError(f"{at}: {cause}") from cause
        if problem:
            raise CorruptError(f"{at}: {problem}")
        found.append(
            StoredTensor(
                entry.name, entry.dtype, tuple(entry.shape), start + entry.begin, num_bytes
            )
        )
    if start + position != file_bytes:
        raise CorruptError(f"{where}: {file_bytes - start - position} bytes belong to no tensor")
    return found


class _Entry(NamedTuple):
    """One row of a header; only begin and end are checked yet."""

    name: str
    dtype: str
    shape: list[int]
    begin: int
    end: int


def _header(view: memoryview, where: str) -> tuple[list[_Entry], int]:
    """The rows of the header, and where the data starts.

    Raises:
        CorruptError: truncated, or no JSON of the right form.
    """
    start = header_bytes(view, where=where)
    if start > len(view):
        raise CorruptError(f"{where}: the header claims {start - _LENGTH_BYTES} bytes")
    try:
        header = json.loads(bytes(view[_LENGTH_BYTES:start]), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as cause:
        raise CorruptError(f"{where}: the header is no JSON: {cause}") from cause
    if not isinstance(header, dict):
        raise CorruptError(f"{where}: the header is no JSON object")
    header.pop("__metadata__", None)
    return [_entry(name, entry, where) for name, entry in header.items()], start


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    if len({name for name, _ in pairs}) != len(pairs):
        raise ValueError("the same name twice")
    return dict(pairs)


def _entry(name: str, entry: object, where: str) -> _Entry:
    match entry:
        case {
            "dtype": str() as dtype,
            "shape": [*shape],
            "data_offsets": [int() as begin, int() as end],
            **rest,
        } if not rest and 0 <= begin <= end < 1 << 48:
            return _Entry(name, dtype, shape, begin, end)
    raise CorruptError(f"{where}: tensor {name!r}: {str(entry)[:200]} is no description")
