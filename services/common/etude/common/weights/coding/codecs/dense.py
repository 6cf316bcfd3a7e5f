"""Dense blocks: the new words themselves, as they are or as compressed byte planes.

Payload: words, little-endian; with DENSE_PLANES byte planes of them (see planes).
"""

import numpy as np
from typing_extensions import Buffer

from etude.common.errors import CorruptError
from etude.common.weights.coding.codecs import planes
from etude.common.weights.coding.codecs.ids import DENSE_PLANES, Encoded
from etude.common.weights.tensors.words import Words


def encode(words: Words, *, compress: bool = True) -> Encoded:
    """The words of one block; planes only where they are smaller.  [n]."""
    raw = np.ascontiguousarray(words).tobytes()
    if not compress or not raw:
        return Encoded(raw, 0)
    width = words.dtype.itemsize
    octets = np.frombuffer(raw, np.uint8).reshape(-1, width)
    payload = planes.pack_planes(np.ascontiguousarray(octets.T))
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
        CorruptError: not what encode() writes for this number of words.
    """
    data = memoryview(payload).cast("B")
    if flags & ~DENSE_PLANES:
        raise CorruptError(f"{where}: flags: {flags} is unknown to dense blocks")
    if not flags:
        if len(data) != elements * word.itemsize:
            raise CorruptError(f"{where}: {len(data)} bytes for {elements} words of {word}")
        # The payload may lie at any address; compiled loops want aligned words.
        return np.require(np.frombuffer(data, word), requirements=["A"])
    return _join_planes(data, elements=elements, word=word, where=where)


def _join_planes(
    data: memoryview, *, elements: int, word: np.dtype[np.unsignedinteger], where: str
) -> Words:
    width = word.itemsize
    if len(data) >= elements * width:
        raise CorruptError(f"{where}: {len(data)} bytes for {width} planes of {elements}")
    found = planes.unpack_planes(data, elements=elements, width=width, where=where)
    return np.ascontiguousarray(found.T).reshape(-1).view(word)
