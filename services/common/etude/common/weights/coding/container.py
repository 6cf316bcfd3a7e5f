"""The container of blocks: payloads one behind the other, an index of columns, a trailer.

`payloads | index | trailer`, little-endian. The index is one zstd frame of columns, one row per
block, sorted by (tensor, tile, lo). The trailer is for tools: readers know the place and digest of
the index from the manifest, and ask for just that range.
"""

import hashlib
import struct
from typing import NamedTuple

import numpy as np
from blake3 import blake3

from etude.common.errors import CorruptError
from etude.common.weights.coding import index_validation
from etude.common.weights.coding.block_index import COLUMNS, HASH_BYTES, BlockRow, Index
from etude.common.weights.coding.codecs import zstd
from etude.common.weights.coding.codecs.ids import Codec, Encoded
from etude.common.weights.tensors.schema import Schema

__all__ = ["BlockRow", "Container", "ContainerWriter", "Index", "parse_index"]

MAGIC = b"ETUDEDLT"
FORMAT = 1
TRAILER = struct.Struct("<8sHBBIQI4x32s")
"""Magic, format, kind, 0, blocks, index offset, index length, padding, index SHA-256."""
DELTA, COMPLETE = 0, 1
"""Kinds: blocks of changes, or every element of the publisher's shards."""

ROW_BYTES = sum(np.dtype(kind).itemsize for _, kind in COLUMNS) + HASH_BYTES

_MAX_RATIO = 256
"""Hashes do not compress: an index that grows more under zstd is none of ours."""


class Container(NamedTuple):
    """An object, ready to be stored."""

    data: bytes
    index_offset: int
    index_length: int
    index_sha256: str
    blocks: int

    @property
    def size(self) -> int:
        return len(self.data)


class ContainerWriter:
    """Puts blocks together; they come sorted by (tensor, tile, lo)."""

    def __init__(self, *, kind: int = DELTA) -> None:
        self._kind = kind
        self._parts: list[bytes] = []
        self._rows: list[BlockRow] = []
        self._offset = 0

    def add(  # noqa: PLR0913, PLR0917 - the columns of a row
        self,
        tensor: int,
        tile: int,
        lo: int,
        hi: int,
        changed: int,
        codec: Codec,
        encoded: Encoded,
    ) -> None:
        """Append a block.

        Raises:
            ValueError: it is not behind the last one.
        """
        last = self._rows[-1] if self._rows else None
        if last and (last[:2] > (tensor, tile) or (last[:2] == (tensor, tile) and last.hi > lo)):
            raise ValueError(f"block {tensor}/{tile}/{lo} after {last[:4]}")
        payload = encoded.payload
        digest = blake3(payload).digest(HASH_BYTES)
        at = (tensor, tile, lo, hi, self._offset, len(payload))
        self._rows.append(BlockRow(*at, changed, codec, encoded.flags, digest))
        self._parts.append(payload)
        self._offset += len(payload)

    def finish(self) -> Container:
        columns = [
            np.array([row[place] for row in self._rows], kind).tobytes()
            for place, (_, kind) in enumerate(COLUMNS)
        ]
        index = zstd.compress(b"".join([*columns, *(row.blake3 for row in self._rows)]))
        sha256 = hashlib.sha256(index)
        trailer = TRAILER.pack(
            MAGIC,
            FORMAT,
            self._kind,
            0,
            len(self._rows),
            self._offset,
            len(index),
            sha256.digest(),
        )
        data = b"".join([*self._parts, index, trailer])
        return Container(data, self._offset, len(index), sha256.hexdigest(), len(self._rows))


def parse_index(
    data: bytes, *, schema: Schema, size: int, index_offset: int, sha256: str, where: str
) -> Index:
    """The index of a container, every row checked against the schema.

    Args:
        data: the index, as stored.
        schema: of the policy.
        size: of the object, in bytes.
        index_offset: where the index lies in the object.
        sha256: hexadecimal digest of data.
        where: names the object in errors.

    Raises:
        CorruptError: damaged, or a row that no writer makes; the row and its field are named.
    """
    if hashlib.sha256(data).hexdigest() != sha256:
        raise CorruptError(f"{where}: index: content does not match its SHA-256 digest")
    if index_offset + len(data) + TRAILER.size != size:
        raise CorruptError(f"{where}: index: does not end where the trailer starts")
    # A payload has a byte or more, but for the one of an empty container.
    most = min(index_offset * ROW_BYTES, max(1 << 20, _MAX_RATIO * len(data)))
    content = zstd.decompress(data, least=0, most=most, where=f"{where}: index")
    if len(content) % ROW_BYTES:
        raise CorruptError(f"{where}: index: {len(content)} bytes are no rows of {ROW_BYTES}")
    index = _columns(content, len(content) // ROW_BYTES)
    fault = index_validation.find_fault(index, schema, payload_bytes=index_offset)
    if fault:
        raise CorruptError(f"{where}: index: {fault}")
    return index


def _columns(content: bytes, rows: int) -> Index:
    columns = {}
    start = 0
    for name, kind in COLUMNS:
        column = np.frombuffer(content, kind, rows, start)
        # A column may start at any address; compiled loops want aligned numbers.
        columns[name] = np.require(column, requirements=["A"])
        start += column.nbytes
    hashes = np.frombuffer(content, np.uint8, rows * HASH_BYTES, start)
    return Index(**columns, blake3=hashes.reshape(rows, HASH_BYTES))
