"""Dense blocks: the new words themselves, as they are or as compressed byte planes.

Payload: words, little-endian; with DENSE_PLANES `length u32` per byte of a word, then the planes,
lowest byte first, each a zstd frame if that is smaller and raw if its length is the number of
elements.
"""

import struct

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

from etude.common.errors import CorruptError
from etude.common.weights.codecs import zstd
from etude.common.weights.codecs.ids import DENSE_PLANES, Encoded
from etude.common.weights.words import Words


def encode(words: Words, *, compress: bool = True) -> Encoded:
    """The words of one block; planes only where they are smaller.  [n]."""
    raw = np.ascontiguousarray(words).tobytes()
    if not compress or not raw:
        return Encoded(raw, 0)
    width = words.dtype.itemsize
    octets = np.frombuffer(raw, np.uint8).reshape(-1, width)
    planes = [_smaller(np.ascontiguousarray(octets[:, place])) for place in range(width)]
    lengths = struct.pack(f"<{width}I", *map(len, planes))
    payload = b"".join([lengths, *planes])
    return Encoded(payload, DENSE_PLANES) if len(payload) < len(raw) else Encoded(raw, 0)


def decode(
    payload: Buffer,
    *,
    elements: int,
    flags: int,
    word: np.dtype[np.unsignedinteger],
    where: str,
) -> Words:
    """The words of a block, possibly a view into the payload.  [elements].

    Raises:
        CorruptError: not what encode() writes for so many words.
    """
    data = memoryview(payload).cast("B")
    if flags & ~DENSE_PLANES:
        raise CorruptError(f"{where}: flags: {flags} is unknown to dense blocks")
    if not flags:
        if len(data) != elements * word.itemsize:
            raise CorruptError(f"{where}: {len(data)} bytes for {elements} words of {word}")
        # The payload may lie at any address; compiled loops want aligned words.
        return np.require(np.frombuffer(data, word), requirements=["A"])
    return _joined(data, elements=elements, word=word, where=where)


def _joined(
    data: memoryview, *, elements: int, word: np.dtype[np.unsignedinteger], where: str
) -> Words:
    width = word.itemsize
    if len(data) < 4 * width or len(data) >= elements * width:
        raise CorruptError(f"{where}: {len(data)} bytes for {width} planes of {elements}")
    lengths = struct.unpack_from(f"<{width}I", data)
    if 4 * width + sum(lengths) != len(data) or max(lengths) > elements:
        raise CorruptError(f"{where}: planes: lengths {lengths} in a payload of {len(data)}")
    out = np.empty((elements, width), np.uint8)
    start = 4 * width
    for place, length in enumerate(lengths):
        plane = data[start : start + length]
        start += length
        out[:, place] = _plane(plane, elements, where=f"{where}: plane {place}")
    return out.reshape(-1).view(word)


def _plane(plane: memoryview, elements: int, *, where: str) -> npt.NDArray[np.uint8]:
    if len(plane) == elements:
        return np.frombuffer(plane, np.uint8)
    return np.frombuffer(zstd.expanded(plane, least=elements, most=elements, where=where), np.uint8)


def _smaller(plane: npt.NDArray[np.uint8]) -> bytes:
    frame = zstd.compressed(plane.data)
    return frame if len(frame) < plane.size else plane.tobytes()
