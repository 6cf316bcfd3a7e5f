"""Byte planes: the same byte of every word side by side, each plane a zstd frame or raw.

Payload: `length u32` per byte of a word, then the planes, lowest byte first, each a zstd frame if
that is smaller and raw if its length is the number of elements.
"""

import struct

import numpy as np
import numpy.typing as npt

from etude.common.errors import CorruptError
from etude.common.weights.coding.codecs import zstd

Planes = npt.NDArray[np.uint8]
"""[bytes of a word, n]"""


def pack_planes(planes: Planes) -> bytes:
    """The payload of some planes."""
    frames = [_smaller(plane) for plane in planes]
    return b"".join([struct.pack(f"<{len(frames)}I", *map(len, frames)), *frames])


def unpack_planes(data: memoryview, *, elements: int, width: int, where: str) -> Planes:
    """The planes of a payload.

    Raises:
        CorruptError: not what pack_planes() writes for these numbers of words and bytes.
    """
    start = 4 * width
    if len(data) < start:
        raise CorruptError(f"{where}: {len(data)} bytes for {width} planes of {elements}")
    lengths = struct.unpack_from(f"<{width}I", data)
    if start + sum(lengths) != len(data) or max(lengths) > elements:
        raise CorruptError(f"{where}: planes: lengths {lengths} in a payload of {len(data)}")
    planes = np.empty((width, elements), np.uint8)
    for place, length in enumerate(lengths):
        plane = data[start : start + length]
        start += length
        planes[place] = _plane(plane, elements, where=f"{where}: plane {place}")
    return planes


def _plane(plane: memoryview, elements: int, *, where: str) -> npt.NDArray[np.uint8]:
    if len(plane) == elements:
        return np.frombuffer(plane, np.uint8)
    return np.frombuffer(
        zstd.decompress(plane, least=elements, most=elements, where=where), np.uint8
    )


def _smaller(plane: npt.NDArray[np.uint8]) -> bytes:
    frame = zstd.compress(plane.data)
    return frame if len(frame) < plane.size else plane.tobytes()
