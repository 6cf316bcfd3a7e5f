"""Number formats as raw unsigned words: what is compared, coded and hashed, never computed with."""

import numpy as np
import numpy.typing as npt

from etude.common.weights.tensors.safetensors import ITEM_BYTES

Words = npt.NDArray[np.unsignedinteger]
"""The raw bits of a tensor's elements, row-major, one unsigned integer per element. [n]"""

Indices = npt.NDArray[np.uint32]
"""Places inside a tile, strictly increasing. [k]"""

_UNSIGNED: dict[int, type[np.unsignedinteger]] = {
    1: np.uint8,
    2: np.uint16,
    4: np.uint32,
    8: np.uint64,
}

ORDERED = frozenset({"BF16", "F16", "F32", "F64", "F8_E4M3", "F8_E5M2"})
"""Sign-magnitude formats: neighbours on their ulp axis are neighbours in value."""


def word_type(dtype: str) -> np.dtype[np.unsignedinteger]:
    """The unsigned integer as wide as one element of a format named in ITEM_BYTES."""
    return np.dtype(_UNSIGNED[ITEM_BYTES[dtype]]).newbyteorder("<")


def lanes_per_element(dtype: str) -> int:
    """Number of 16-bit lanes of the state digest for one element: one unless it is wider."""
    return max(1, ITEM_BYTES[dtype] // 2)
