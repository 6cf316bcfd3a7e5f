"""Staged file: verified, decoded blocks that the receiver hands to the workers of one host.

File: 8-byte-aligned arrays of all blocks, then one table row per block, then a footer. It is
written atomically, so that a worker sees a whole file or none.
"""

import mmap
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from etude.common import atomic
from etude.common.errors import CorruptError
from etude.common.weights.coding.codecs.ids import Codec
from etude.common.weights.tensors.words import Indices, Words

_MAGIC = 0x3153_4544_5554_4501
_ROW = np.dtype(
    [
        *((name, "<u4") for name in ("tensor", "tile", "lo", "hi", "changed")),
        *((name, "<u1") for name in ("codec", "flags", "word", "kind")),
        *((name, "<u8") for name in ("start", "places", "length")),
    ]
)
_FOOTER = np.dtype([("magic", "<u8"), ("rows", "<u8"), ("table", "<u8")])
_CHANGES, _DENSE, _PAYLOAD = 0, 1, 2


class StagedBlock(NamedTuple):
    """One block, ready for a worker that holds the old words."""

    tensor: int
    """Place in the schema."""
    tile: int
    lo: int
    hi: int
    codec: Codec
    index: Indices | None  # type: ignore[assignment] # the field is more wanted than tuple.index()
    """Places counted from lo; None where data are all new words, or nothing is decoded."""
    data: Words | None
    """Ulp differences (old XOR new for the baseline), or new words; None if not decoded."""
    payload: bytes | memoryview | None = None
    """As in the container, where only the old words can decode it."""
    flags: int = 0
    """Of the payload."""
    changed: int = 0
    """Changes of the payload."""

    @property
    def num_changed(self) -> int:
        """Most elements of which it can be that they change."""
        if self.payload is not None:
            return self.changed
        return self.hi - self.lo if self.index is None else self.index.size

    @property
    def element_places(self) -> Indices:
        """Places of the data's elements, counted from lo."""
        if self.index is None:
            return np.arange(self.hi - self.lo, dtype=np.uint32)
        return self.index


def write_blocks(path: Path, blocks: Iterable[StagedBlock]) -> None:
    """Stage blocks for the workers; they may come from a generator and are not kept."""
    with atomic.replacing(path) as file:
        rows = [_write_block(file, block) for block in blocks]
        footer = np.array([(_MAGIC, len(rows), file.tell())], _FOOTER)
        file.write(np.array(rows, _ROW).tobytes())
        file.write(footer.tobytes())


def read_staged(path: Path) -> list[StagedBlock]:
    """The staged blocks, as views into the mapped file.

    Raises:
        CorruptError: not a whole staged file.
    """
    with path.open("rb") as file:
        size = path.stat().st_size
        if size < _FOOTER.itemsize:
            raise CorruptError(f"{path}: {size} bytes are no staged file")
        data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    footer = np.frombuffer(data[size - _FOOTER.itemsize :], _FOOTER)[0]
    rows, table = int(footer["rows"]), int(footer["table"])
    if int(footer["magic"]) != _MAGIC or table + rows * _ROW.itemsize + _FOOTER.itemsize != size:
        raise CorruptError(f"{path}: no whole staged file")
    columns = np.frombuffer(data[table : size - _FOOTER.itemsize], _ROW)
    return [_block(data[:table], row, f"{path}: block {n}") for n, row in enumerate(columns)]


def _write_block(file: BinaryIO, block: StagedBlock) -> tuple[int, ...]:
    start = file.tell()
    places = length = word = 0
    kind = _PAYLOAD
    if block.payload is not None:
        length = file.write(block.payload)
    elif block.data is not None:
        kind = _DENSE if block.index is None else _CHANGES
        word = block.data.dtype.itemsize
        if block.index is not None:
            places = block.index.size
            file.write(np.ascontiguousarray(block.index).data)
            _pad(file)
        length = file.write(np.ascontiguousarray(block.data).data)
    _pad(file)
    at = (block.tensor, block.tile, block.lo, block.hi, block.changed)
    return (*at, block.codec, block.flags, word, kind, start, places, length)


def _pad(file: BinaryIO) -> None:
    file.write(bytes(-file.tell() % 8))


def _block(data: memoryview, row: np.void, where: str) -> StagedBlock:
    fields = {str(name): int(row[name]) for name in _ROW.names or ()}
    start, places, length = fields["start"], fields["places"], fields["length"]
    data_at = start + -(-4 * places // 8) * 8
    if start % 8 or data_at + length > len(data) or fields["codec"] not in set(Codec):
        raise CorruptError(f"{where}: beyond the file, or of codec {fields['codec']}")
    block = StagedBlock(
        fields["tensor"],
        fields["tile"],
        fields["lo"],
        fields["hi"],
        Codec(fields["codec"]),
        index=None,
        data=None,
        flags=fields["flags"],
        changed=fields["changed"],
    )
    stored = data[data_at : data_at + length]
    if fields["kind"] == _PAYLOAD:
        return block._replace(payload=stored)
    if fields["word"] not in {1, 2, 4, 8} or length % fields["word"]:
        raise CorruptError(f"{where}: {length} bytes of words of {fields['word']}")
    words = np.frombuffer(stored, f"<u{fields['word']}")
    if fields["kind"] == _DENSE:
        return block._replace(data=words)
    index = np.frombuffer(data[start : start + 4 * places], "<u4")
    if index.size != words.size:
        raise CorruptError(f"{where}: {index.size} places for {words.size} words")
    return block._replace(index=index, data=words)
