"""Codecs and flags by the numbers that stand for them in a container."""

from enum import IntEnum
from typing import NamedTuple


class Codec(IntEnum):
    """Codec of a block's payload."""

    DENSE = 0
    """New words."""
    L1 = 1
    """Gaps and ulp differences as Rice codes."""
    L2 = 2
    """Rank gaps by class of the old exponent, differences as Rice codes."""
    L2R = 3
    """L2 with differences as rANS codes."""
    DENSE_DELTA = 4
    """Ulp differences of every element, as byte planes."""
    XOR_ZSTD = 15
    """Old XOR new of a whole tensor under zstd: what others do, for comparisons."""


DENSE_PLANES = 1
"""Dense: byte planes, each zstd or raw."""

FLAGS = {
    Codec.DENSE: DENSE_PLANES,
    Codec.L1: 0,
    Codec.L2: 0,
    Codec.L2R: 0,
    Codec.DENSE_DELTA: 0,
    Codec.XOR_ZSTD: 0,
}
"""All flags that a codec knows."""

WHOLE_TENSOR = 0xFFFFFFFF
"""Tile number of a block whose places are row-major positions in its tensor."""


class Encoded(NamedTuple):
    """A payload, and the flags it is read with."""

    payload: bytes
    flags: int
