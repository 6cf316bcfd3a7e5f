"""Reader of blocks from the store: only selected ones, each verified before it is decoded."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from blake3 import blake3

from etude.common.blobs import Range, RangeReader, Store
from etude.common.errors import CorruptError
from etude.common.weights.coding.block_index import HASH_BYTES, BlockRow, Index
from etude.common.weights.coding.codecs import dense, dense_delta, l1, xor
from etude.common.weights.coding.codecs.ids import Codec
from etude.common.weights.coding.container import parse_index
from etude.common.weights.protocol.manifest import PayloadObject
from etude.common.weights.protocol.plan import Edge
from etude.common.weights.replicas import staged_file
from etude.common.weights.replicas.block_selection import (
    BlockSelector,
    select_all,
    select_regions,
    select_slice,
)
from etude.common.weights.replicas.staged_file import StagedBlock
from etude.common.weights.tensors.schema import Schema
from etude.common.weights.tensors.words import word_type

__all__ = ["VerifiedBlock", "read_blocks", "select_regions", "select_slice", "stage", "stage_block"]

MAX_REQUEST_BYTES = 16 << 20
"""Neighbouring blocks are asked for together up to this size."""


class VerifiedBlock(NamedTuple):
    """One block whose bytes were verified."""

    row: BlockRow
    payload: memoryview


def read_blocks(
    store: Store,
    objects: Sequence[PayloadObject],
    schema: Schema,
    *,
    wanted: BlockSelector = select_all,
    ranges: RangeReader | None = None,
) -> Iterator[VerifiedBlock]:
    """The wanted blocks of some objects, in the order of arrival.

    Only index and wanted blocks are asked for; what is damaged is read a second time.

    Raises:
        CorruptError: an index or a block is damaged in the store, or declares what cannot be.
        MissingError: an object was collected.
        StoreError: the store failed too often.
    """
    reader = RangeReader(store) if ranges is None else ranges
    for item, index in _indexes(store, reader, objects, schema):
        chosen = index.select(wanted(index))
        where = f"{store.url}/{item.key}"
        requests = {each.range: each.rows for each in _requests(item.key, chosen)}
        for answer in reader.read(requests):
            for row in requests[answer.range]:
                start = row.offset - answer.range.start
                payload = answer.data[start : start + row.length]
                if not _is_intact(row, payload):
                    payload = _again(store, item.key, row, f"{where}: {_name(row, schema)}")
                yield VerifiedBlock(row, payload)


def stage(
    store: Store,
    edge: Edge,
    schema: Schema,
    path: Path,
    wanted: BlockSelector = select_all,
    *,
    ranges: RangeReader | None = None,
) -> int:
    """Fetch, verify and decode what an edge changes into a file for the workers.

    Returns:
        Bytes that were read from the store.

    Raises:
        CorruptError: damaged in the store, or not what a publisher writes.
        MissingError: an object was collected.
        StoreError: the store failed too often.
    """
    total = sum(item.index_length for item in edge.objects)

    def decoded() -> Iterator[StagedBlock]:
        nonlocal total
        for block in read_blocks(store, edge.objects, schema, wanted=wanted, ranges=ranges):
            total += block.row.length
            yield stage_block(block, schema, where=f"{store.url}: version {edge.target.version}")

    staged_file.write_blocks(path, decoded())
    return total


def stage_block(block: VerifiedBlock, schema: Schema, *, where: str) -> StagedBlock:
    """The block decoded, or as it is where only the old words can decode it.

    Raises:
        CorruptError: not what its codec writes.
    """
    row, payload = block
    codec = Codec(row.codec)
    at = (row.tensor, row.tile, row.lo, row.hi, codec)
    size, word = row.hi - row.lo, word_type(schema.tensors[row.tensor].dtype)
    where = f"{where}: {_name(row, schema)}"
    counts = {"elements": size, "flags": row.flags}
    match codec:
        case Codec.DENSE:
            words = dense.decode(payload, **counts, word=word, where=where)
            return StagedBlock(*at, None, words)
        case Codec.DENSE_DELTA:
            found = dense_delta.decode(
                payload, **counts, changed=row.changed, word=word, where=where
            )
            return StagedBlock(*at, found.index, found.delta)
        case Codec.L1:
            found = l1.decode(payload, **counts, changed=row.changed, word=word, where=where)
            return StagedBlock(*at, found.index, found.delta)
        case Codec.XOR_ZSTD:
            found = xor.decode(payload, **counts, changed=row.changed, word=word, where=where)
            return StagedBlock(*at, found.index, found.delta)
        case Codec.L2 | Codec.L2R:
            return StagedBlock(*at, None, None, payload, row.flags, row.changed)


class _Request(NamedTuple):
    range: Range
    rows: list[BlockRow]


def _requests(key: str, index: Index) -> Iterator[_Request]:
    """Ranges without gaps, each of a few blocks."""
    rows: list[BlockRow] = []
    start = stop = 0
    for row in index:
        fits = row.offset == stop and row.offset + row.length - start <= MAX_REQUEST_BYTES
        if rows and not fits:
            yield _Request(Range(key, start, stop - start), rows)
            rows = []
        if not rows:
            start = row.offset
        rows.append(row)
        stop = row.offset + row.length
    if rows:
        yield _Request(Range(key, start, stop - start), rows)


class _Indexed(NamedTuple):
    item: PayloadObject
    index: Index  # type: ignore[assignment] # the field is more wanted than tuple.index()


def _indexes(
    store: Store, reader: RangeReader, objects: Iterable[PayloadObject], schema: Schema
) -> Iterator[_Indexed]:
    items = {Range(each.key, each.index_offset, each.index_length): each for each in objects}
    for answer in reader.read(items):
        item = items[answer.range]
        try:
            index = _index(item, bytes(answer.data), schema, store.url)
        except CorruptError:
            # Damage on the way does not repeat, damage in the store does.
            index = _index(item, store.get_range(*answer.range), schema, store.url)
        yield _Indexed(item, index)


def _index(item: PayloadObject, data: bytes, schema: Schema, url: str) -> Index:
    return parse_index(
        data,
        schema=schema,
        size=item.size,
        index_offset=item.index_offset,
        sha256=item.index_sha256,
        where=f"{url}/{item.key}",
    )


def _is_intact(row: BlockRow, payload: memoryview) -> bool:
    return blake3(payload).digest(HASH_BYTES) == row.blake3


def _again(store: Store, key: str, row: BlockRow, where: str) -> memoryview:
    payload = memoryview(store.get_range(key, row.offset, row.length))
    if not _is_intact(row, payload):
        raise CorruptError(f"{where}: blake3: content does not match its digest")
    return payload


def _name(row: BlockRow, schema: Schema) -> str:
    name = schema.tensors[row.tensor].name
    return f"tensor {name!r}, tile {row.tile}, [{row.lo}, {row.hi})"
