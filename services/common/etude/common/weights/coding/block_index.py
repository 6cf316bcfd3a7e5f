"""The rows of an index: where each block of a container lies, and what it changes."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

COLUMNS: tuple[tuple[str, str], ...] = (
    ("tensor", "<u4"),
    ("tile", "<u4"),
    ("lo", "<u4"),
    ("hi", "<u4"),
    ("offset", "<u8"),
    ("length", "<u4"),
    ("changed", "<u4"),
    ("codec", "|u1"),
    ("flags", "|u1"),
)
"""Of the index, in their order; the hashes follow."""

HASH_BYTES = 16

_ROWS = 4096
"""That are read at once: column by column is faster, and all of a large model are many."""


class BlockRow(NamedTuple):
    """One block of a container."""

    tensor: int
    """Place in the schema."""
    tile: int
    lo: int
    """First element, in its tile."""
    hi: int
    offset: int
    """Of the payload, in the object."""
    length: int
    """Of the payload, in bytes."""
    changed: int
    codec: int
    flags: int
    blake3: bytes
    """First 16 bytes of the payload's digest."""


@dataclass(frozen=True, slots=True, eq=False)
class Index:
    """The rows of a container as columns.  [n] each."""

    tensor: npt.NDArray[np.uint32]
    tile: npt.NDArray[np.uint32]
    lo: npt.NDArray[np.uint32]
    hi: npt.NDArray[np.uint32]
    offset: npt.NDArray[np.uint64]
    length: npt.NDArray[np.uint32]
    changed: npt.NDArray[np.uint32]
    codec: npt.NDArray[np.uint8]
    flags: npt.NDArray[np.uint8]
    blake3: npt.NDArray[np.uint8]
    """[n, 16]"""

    def __len__(self) -> int:
        return int(self.tensor.size)

    def __iter__(self) -> Iterator[BlockRow]:
        for start in range(0, len(self), _ROWS):
            some = slice(start, start + _ROWS)
            columns = (getattr(self, name)[some].tolist() for name, _ in COLUMNS)
            hashes = (each.tobytes() for each in self.blake3[some])
            yield from (BlockRow(*row) for row in zip(*columns, hashes, strict=True))

    def row(self, place: int) -> BlockRow:
        numbers = {name: int(getattr(self, name)[place]) for name, _ in COLUMNS}
        return BlockRow(**numbers, blake3=self.blake3[place].tobytes())

    def select(self, wanted: npt.NDArray[np.bool_]) -> "Index":
        """The rows of a mask.  [n]."""
        names = (*(name for name, _ in COLUMNS), "blake3")
        return Index(*(getattr(self, name)[wanted] for name in names))
