"""The baseline: zstd of old XOR new over a whole tensor, as others ship deltas.

For comparisons, and for a run that is set to it. Its blocks are ranges of a tensor's row-major
elements; the differences that it decodes to are exclusive ors, not steps on the ulp axis.
"""

import numpy as np
from typing_extensions import Buffer

from etude.common.errors import CorruptError
from etude.common.weights.coding.codecs import zstd
from etude.common.weights.coding.codecs.ids import Encoded
from etude.common.weights.tensors.changes import BlockChanges
from etude.common.weights.tensors.words import Words

MAX_ELEMENTS = 1 << 31
"""Of a block: its places are 32-bit numbers."""


def encode(changes: BlockChanges, *, elements: int) -> Encoded:
    """The payload of a block; the differences are old XOR new."""
    words = np.zeros(elements, changes.delta.dtype)
    words[changes.index] = changes.delta
    return encode_words(words)


def encode_words(words: Words) -> Encoded:
    """The payload of old XOR new.  [n]."""
    return Encoded(zstd.compress(np.ascontiguousarray(words).data), 0)


def decode(
    payload: Buffer,
    *,
    elements: int,
    changed: int,
    flags: int,
    word: np.dtype[np.unsignedinteger],
    where: str,
) -> BlockChanges:
    """Places and values at which old XOR new is not 0.

    Raises:
        CorruptError: not a payload of this number of elements and changes.
    """
    if flags or not 0 < elements <= MAX_ELEMENTS:
        raise CorruptError(f"{where}: flags: {flags}, {elements} elements")
    size = elements * word.itemsize
    frame = memoryview(payload).cast("B")
    words = np.frombuffer(zstd.decompress(frame, least=size, most=size, where=where), word)
    index = np.flatnonzero(words).astype(np.uint32)
    if index.size != changed:
        raise CorruptError(f"{where}: changed: {index.size} elements, not {changed}")
    return BlockChanges(index, words[index])
