"""The container of deltas: rows survive, and nothing that they declare is believed unchecked."""

import hashlib
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.common.errors import CorruptError
from etude.common.weights.coding.block_index import COLUMNS, BlockRow, Index
from etude.common.weights.coding.codecs import zstd
from etude.common.weights.coding.codecs.ids import WHOLE_TENSOR, Codec, Encoded
from etude.common.weights.coding.container import (
    COMPLETE,
    ROW_BYTES,
    TRAILER,
    Container,
    ContainerWriter,
    parse_index,
)
from etude.common.weights.tensors.schema import Schema, TensorSpec
from etude.common.weights.tensors.tiles import tiling


def spec(name: str, dtype: str, shape: tuple[int, ...], split: str = "rows") -> TensorSpec:
    return TensorSpec(name=name, dtype=dtype, shape=shape, split=split)  # type: ignore[arg-type]


SCHEMA = Schema(
    grid=4,
    tensors=(
        spec("a", "BF16", (1000, 600)),
        spec("b", "F32", (70,)),
        spec("c", "BF16", (64, 8192), "columns"),
        spec("d", "BF16", (0, 4)),
        spec("e", "U8", (3, 100, 7)),
    ),
)


def parsed(made: Container, data: bytes | None = None, **other: object) -> Index:
    stop = made.index_offset + made.index_length
    fields = {
        "schema": SCHEMA,
        "size": made.size,
        "index_offset": made.index_offset,
        "sha256": made.index_sha256,
        "where": "here",
        **other,
    }
    index = made.data[made.index_offset : stop] if data is None else data
    return parse_index(index, **fields)  # type: ignore[arg-type]


def container_of(rows: list[BlockRow]) -> Container:
    """A container of any rows, as no writer would make it."""
    columns = [
        np.array([row[i] for row in rows], kind).tobytes() for i, (_, kind) in enumerate(COLUMNS)
    ]
    index = zstd.compress(b"".join([*columns, *(row.blake3 for row in rows)]))
    payloads = bytes(sum(row.length for row in rows) % (1 << 24))
    sha256 = hashlib.sha256(index).hexdigest()
    data = payloads + index + bytes(TRAILER.size)
    return Container(data, len(payloads), len(index), sha256, len(rows))


@st.composite
def any_blocks(draw: st.DrawFn) -> list[tuple[int, int, int, int, int, Encoded]]:
    blocks = []
    for number, each in enumerate(SCHEMA.tensors):
        cut = tiling(each, SCHEMA.grid)
        for tile in range(cut.tiles if each.elements else 0):
            if not draw(st.booleans()):
                continue
            size = cut.tile(tile).elements
            middle = draw(st.integers(1, size - 1))
            for lo, hi in ((0, middle), (middle, size)):
                if draw(st.booleans()):
                    payload = draw(st.binary(min_size=1, max_size=40))
                    changed = draw(st.integers(1, hi - lo))
                    encoded = Encoded(payload, draw(st.integers(0, 1)))
                    blocks.append((number, tile, lo, hi, changed, encoded))
    return blocks


@settings(max_examples=50)
@given(any_blocks())
def test_any_rows_survive(blocks: list[tuple[int, int, int, int, int, Encoded]]) -> None:
    writer = ContainerWriter()
    for number, tile, lo, hi, changed, encoded in blocks:
        writer.add(number, tile, lo, hi, changed, Codec.DENSE, encoded)
    made = writer.finish()
    found = list(parsed(made))
    assert len(found) == made.blocks == len(blocks)
    for row, (number, tile, lo, hi, changed, encoded) in zip(found, blocks, strict=True):
        assert row[:4] == (number, tile, lo, hi)
        assert (row.changed, row.codec, row.flags) == (changed, 0, encoded.flags)
        assert made.data[row.offset : row.offset + row.length] == encoded.payload
        assert row.blake3 == blake3(encoded.payload).digest(16)


def test_the_trailer_leads_to_the_index() -> None:
    writer = ContainerWriter(kind=COMPLETE)
    writer.add(1, 0, 0, 70, 70, Codec.DENSE, Encoded(b"x" * 280, 0))
    made = writer.finish()
    assert TRAILER.size == 64
    magic, _, kind, zero, blocks, offset, length, sha256 = TRAILER.unpack(made.data[-64:])
    assert (magic, kind, zero, blocks, offset) == (b"ETUDEDLT", COMPLETE, 0, 1, 280)
    assert (length, sha256.hex()) == (made.index_length, made.index_sha256)
    assert offset + length + 64 == made.size


def test_blocks_come_in_order() -> None:
    for tensor, tile, lo in ((0, 2, 9), (0, 1, 0), (0, 2, 3)):
        writer = ContainerWriter()
        writer.add(0, 2, 0, 10, 1, Codec.L1, Encoded(b"x", 0))
        with pytest.raises(ValueError, match="after"):
            writer.add(tensor, tile, lo, 20, 1, Codec.L1, Encoded(b"x", 0))


def row(**changed: Any) -> BlockRow:
    good = BlockRow(0, 0, 0, 1000, 0, 40, 10, Codec.L1, 0, bytes(16))
    return good._replace(**changed)


def second(**changed: Any) -> BlockRow:
    return row(**{"lo": 1000, "hi": 2000, "offset": 40, **changed})


def test_the_rows_that_the_next_test_damages_are_right() -> None:
    assert len(parsed(container_of([row(), second()]))) == 2
    whole = row(tensor=2, tile=WHOLE_TENSOR, hi=64 * 8192, codec=Codec.XOR_ZSTD)
    assert len(parsed(container_of([whole]))) == 1


@pytest.mark.parametrize(
    ("rows", "what"),
    [
        ([row(tensor=5)], "block 0: tensor"),
        ([row(tile=4)], "tile: the tensor has no such"),
        ([row(tensor=3, hi=1)], "tile: the tensor has no such"),
        ([row(hi=150_001)], "hi: outside"),
        ([row(lo=1000)], "hi: outside"),
        ([row(lo=1001)], "hi: outside"),
        ([row(changed=0)], "changed"),
        ([row(changed=1001)], "changed"),
        ([row(codec=5)], "codec: unknown"),
        ([row(codec=255)], "codec: unknown"),
        ([row(flags=1)], "flags"),
        ([row(codec=Codec.DENSE, flags=2)], "flags"),
        ([row(codec=Codec.L2)], "whole tiles"),
        ([row(codec=Codec.XOR_ZSTD)], "tile: not one of its codec"),
        ([row(tile=WHOLE_TENSOR)], "tile: not one of its codec"),
        ([row(), second(length=0)], "block 1: length"),
        ([row(length=7000)], "length: no writer"),
        ([row(offset=1)], "offset"),
        ([row(), second(offset=39)], "block 1: offset"),
        ([row(), second(offset=41)], "block 1: offset"),
        ([row(), second(lo=999)], "block 1: lo: overlaps"),
        ([row(tile=1), second(tile=0)], "block 1: tile: not sorted"),
        ([row(tensor=1, hi=70), second(tensor=0)], "block 1: tile: not sorted"),
        (
            [
                row(tensor=2),
                row(tensor=2, tile=WHOLE_TENSOR, codec=Codec.XOR_ZSTD, offset=40),
            ],
            "besides its tiles",
        ),
    ],
)
def test_rows_that_no_writer_makes_are_corrupt(rows: list[BlockRow], what: str) -> None:
    with pytest.raises(CorruptError, match=f"here: index: .*{what}"):
        parsed(container_of(rows))


def test_payloads_beyond_the_last_row_are_corrupt() -> None:
    made = container_of([row()])
    with pytest.raises(CorruptError, match="does not end"):
        parsed(made, size=made.size + 1)
    with pytest.raises(CorruptError, match="last payload"):
        parsed(made, size=made.size + 1, index_offset=41)
    empty = ContainerWriter().finish()
    with pytest.raises(CorruptError, match="no blocks"):
        parsed(empty, size=empty.size + 1, index_offset=1)


def test_an_index_that_unpacks_to_more_than_its_payloads_allow_is_refused_unread() -> None:
    bomb = zstd.compress(bytes(ROW_BYTES << 20))
    made = container_of([row()])
    fields = {"sha256": hashlib.sha256(bomb).hexdigest(), "size": 40 + len(bomb) + TRAILER.size}
    with pytest.raises(CorruptError, match="zstd frame of"):
        parsed(made, bomb, index_offset=40, **fields)
    ragged = zstd.compress(bytes(ROW_BYTES + 1))
    fields = {"sha256": hashlib.sha256(ragged).hexdigest(), "size": 40 + len(ragged) + TRAILER.size}
    with pytest.raises(CorruptError, match="no rows"):
        parsed(made, ragged, index_offset=40, **fields)


def damaged(data: bytes, at: random.Random) -> bytes:
    bad = bytearray(data)
    bad[at.randrange(len(bad))] ^= 1 << at.randrange(8)
    return bytes(bad)


@pytest.mark.parametrize("cut", [damaged, lambda data, at: data[: at.randrange(len(data))]])
def test_a_damaged_index_is_corrupt_by_its_digest_and_harmless_without(
    cut: Callable[[bytes, random.Random], bytes],
) -> None:
    writer = ContainerWriter()
    for tile in range(4):
        writer.add(0, tile, 0, 1000, 10, Codec.L1, Encoded(bytes([tile]) * 40, 0))
    made = writer.finish()
    index = made.data[made.index_offset : made.index_offset + made.index_length]
    at = random.Random(1)
    for _ in range(1000):
        bad = cut(index, at)
        with pytest.raises(CorruptError, match="SHA-256"):
            parsed(made, bad)
        try:
            size = made.index_offset + len(bad) + TRAILER.size
            found = parsed(made, bad, sha256=hashlib.sha256(bad).hexdigest(), size=size)
        except CorruptError:
            continue
        assert (found.offset + found.length <= made.index_offset).all()
        assert (found.hi <= 150_000).all()


def test_a_mask_selects_rows() -> None:
    writer = ContainerWriter()
    for tile in range(3):
        writer.add(0, tile, 0, 10, 1, Codec.L1, Encoded(bytes([tile]), 0))
    index = parsed(writer.finish())
    found = index.select(index.tile == 1)
    assert [each.tile for each in found] == [1]
    assert found.row(0) == index.row(1)
