"""Files of weights with further rows in the embedding and in the output layer, as lists of parts.

No file is held: a part is either a range of the file of before, or a few bytes of new rows.
"""

import json
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from etude.common.errors import Problem, UserError
from etude.common.model_sources.files import ModelFile, RemoteModel
from etude.common.weights.tensors import safetensors
from etude.common.weights.tensors.safetensors import ITEM_BYTES, StoredTensor

FIELD = "model.addTokens"
_ROWS = re.compile(
    r"(^|\.)(embed_tokens|wte|word_embeddings|embed_in|tok_embeddings|lm_head|embed_out)"
    r"\.(weight|bias)$"
)
"""Tensors with a row for each token, by the names that architectures give them."""
_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}
_CHUNK_BYTES = 16 << 20


class Part(NamedTuple):
    """Consecutive bytes of a file."""

    length: int
    start: int = 0
    """First byte in the file of before, unless `data` is set."""
    data: bytes = b""


class ChangedFile(NamedTuple):
    """A file of weights with further rows."""

    parts: Sequence[Part]
    growth: int
    """Bytes of the new rows."""

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return sum(part.length for part in self.parts)


def extend_weights(
    source: RemoteModel, *, known: int, tokens: int, rows: int
) -> dict[str, ChangedFile]:
    """Parts of the files that change so that tokens [known, tokens) have the mean of the others.

    Args:
        source: the model of before; without weights nothing changes.
        known: tokens of before.
        tokens: tokens after.
        rows: of before; rows from `known` on belong to no token.

    Raises:
        UserError: no tensor has a row for each token, or one of a format without a mean.
        CorruptError: a file is damaged.
        UnavailableError: the source gave no answer.
    """
    files = [file for file in source.files if file.name.endswith(".safetensors")]
    changed: dict[str, ChangedFile] = {}
    for file in files:
        tensors = _read_header(source, file)
        if any(_has_rows(tensor, rows) for tensor in tensors):
            changed[file.name] = _write_file(
                source, file, tensors, known=known, tokens=tokens, rows=rows
            )
    if files and not changed:
        what = f"cannot be done: no known tensor has {rows} rows, one for each token"
        fix = "add the tokens with the model's own tools, and remove model.addTokens"
        _refuse(what, source.uri, fix)
    return changed


def read_parts(
    source: RemoteModel, file: ModelFile, parts: Sequence[Part], start: int, length: int
) -> bytes:
    """Bytes [start, start + length) of a file that has these parts."""
    pieces = []
    place = 0
    for part in parts:
        first, last = max(start, place), min(start + length, place + part.length)
        if first < last:
            inside = first - place
            pieces.append(
                part.data[inside : inside + last - first]
                if part.data
                else source.read(file, part.start + inside, last - first)
            )
        place += part.length
    return b"".join(pieces)


def _has_rows(tensor: StoredTensor, rows: int) -> bool:
    return bool(_ROWS.search(tensor.name)) and tensor.shape[:1] == (rows,)


def _read_header(source: RemoteModel, file: ModelFile) -> list[StoredTensor]:
    where = f"{source.uri}: {file.name}"
    size = safetensors.header_bytes(source.read(file, 0, min(8, file.size)), where=where)
    header = source.read(file, 0, min(size, file.size))
    return safetensors.list_tensors(header, file.size, where=where)


def _write_file(
    source: RemoteModel,
    file: ModelFile,
    tensors: Sequence[StoredTensor],
    *,
    known: int,
    tokens: int,
    rows: int,
) -> ChangedFile:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    parts: list[Part] = []
    offset = 0
    for tensor in tensors:
        shape, data = tensor.shape, [Part(tensor.num_bytes, tensor.start)]
        if _has_rows(tensor, rows):
            shape = (max(rows, tokens), *tensor.shape[1:])
            data = list(_write_rows(source, file, tensor, known=known, tokens=tokens))
        length = sum(part.length for part in data)
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(shape),
            "data_offsets": [offset, offset + length],
        }
        offset += length
        parts += data
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    growth = offset - sum(tensor.num_bytes for tensor in tensors)
    return ChangedFile([Part(len(head), data=head), *parts], growth)


def _write_rows(
    source: RemoteModel, file: ModelFile, tensor: StoredTensor, *, known: int, tokens: int
) -> Iterator[Part]:
    """Rows of known tokens, the mean of them for each new token, and rows without a token."""
    row_bytes = tensor.num_bytes // tensor.shape[0]
    if not row_bytes:
        _refuse(f"meets tensor {tensor.name}, which has empty rows", source.uri, "remove it")
    mean = _mean_row(source, file, tensor, known, row_bytes)
    yield Part(known * row_bytes, tensor.start)
    yield Part((tokens - known) * row_bytes, data=mean * (tokens - known))
    rest = (tensor.shape[0] - tokens) * row_bytes
    if rest > 0:
        yield Part(rest, tensor.start + tokens * row_bytes)


def _mean_row(
    source: RemoteModel, file: ModelFile, tensor: StoredTensor, known: int, row_bytes: int
) -> bytes:
    """Mean of the first rows, in the tensor's format; summed in 64 bits."""
    if tensor.dtype != "BF16" and tensor.dtype not in _DTYPES:
        what = f"meets tensor {tensor.name} in {tensor.dtype}, which has no mean"
        _refuse(what, source.uri, "name a model in bf16, fp16 or fp32")
    width = row_bytes // ITEM_BYTES[tensor.dtype]
    total = np.zeros(width, np.float64)
    at_once = max(1, _CHUNK_BYTES // row_bytes)
    for first in range(0, known, at_once):
        count = min(at_once, known - first)
        data = source.read(file, tensor.start + first * row_bytes, count * row_bytes)
        total += _to_floats(data, tensor.dtype).reshape(count, width).sum(axis=0, dtype=np.float64)
    return _from_floats(total / known, tensor.dtype)


def _to_floats(data: bytes, dtype: str) -> NDArray[np.floating]:
    if dtype == "BF16":
        words = np.frombuffer(data, "<u2").astype(np.uint32) << 16
        return words.view(np.float32)
    return np.frombuffer(data, _DTYPES[dtype])


def _from_floats(values: NDArray[np.float64], dtype: str) -> bytes:
    if dtype != "BF16":
        return values.astype(_DTYPES[dtype]).tobytes()
    words = values.astype(np.float32).view(np.uint32)
    # To the nearest, ties to even.
    rounded = (words + 0x7FFF + ((words >> 16) & 1)) >> 16
    return rounded.astype("<u2").tobytes()


def _refuse(what: str, where: str, fix: str) -> NoReturn:
    raise UserError(Problem("InvalidModel", what, f"{FIELD}: {where}", fix))
