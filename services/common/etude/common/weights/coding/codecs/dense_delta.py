"""Dense deltas: how far every word of a block moved, for blocks in which most words change.

Payload: byte planes (see planes) of the zigzag of each difference on the ulp axis as a signed
word, 0 where nothing changed. Of fp32 weights at learning rates that change all of them the upper
planes are nearly empty and the lower ones noise: half of the words themselves, and a fifth less
than zstd finds in old XOR new.
"""

import numpy as np
from typing_extensions import Buffer

from etude.common.errors import CorruptError
from etude.common.weights.coding.codecs import planes
from etude.common.weights.coding.codecs.ids import Encoded
from etude.common.weights.coding.codecs.planes import Planes
from etude.common.weights.tensors.changes import BlockChanges
from etude.common.weights.tensors.jit import compiled, readonly
from etude.common.weights.tensors.words import Indices, Words


def encode(changes: BlockChanges, *, elements: int) -> Encoded:
    """The payload of a block.  k changes."""
    zigzags = np.zeros((changes.delta.itemsize, elements), np.uint8)
    _split(readonly(changes.index), readonly(changes.delta), zigzags)
    return Encoded(planes.pack_planes(zigzags), 0)


def decode(
    payload: Buffer,
    *,
    elements: int,
    changed: int,
    flags: int,
    word: np.dtype[np.unsignedinteger],
    where: str,
) -> BlockChanges:
    """The changes of a block.

    Raises:
        CorruptError: not a payload of this number of elements and changes.
    """
    if flags:
        raise CorruptError(f"{where}: flags: {flags} is unknown to dense deltas")
    data = memoryview(payload).cast("B")
    zigzags = planes.unpack_planes(data, elements=elements, width=word.itemsize, where=where)
    # One more than fit: the loop writes before it knows whether a place counts.
    index, delta = np.empty(elements + 1, np.uint32), np.empty(elements + 1, word)
    found = _join(readonly(zigzags), index, delta)
    if found != changed:
        raise CorruptError(f"{where}: changed: {found} elements, not {changed}")
    return BlockChanges(index[:found], delta[:found])


@compiled
def _split(index: Indices, delta: Words, zigzags: Planes) -> None:
    """Fill planes that are 0."""
    shift = np.uint64(64 - 8 * delta.itemsize)
    for i in range(index.size):
        # Sign-extended from w bits: shifted up as unsigned, down as signed.
        signed = np.int64(np.uint64(delta[i]) << shift) >> np.int64(shift)
        zigzag = np.uint64(signed << 1) ^ np.uint64(signed >> 63)
        for place in range(delta.itemsize):
            zigzags[place, index[i]] = np.uint8(zigzag)
            zigzag >>= np.uint64(8)


@compiled
def _join(zigzags: Planes, index: Indices, delta: Words) -> int:
    """Fill the changes; returns how many there are."""
    count = 0
    for i in range(zigzags.shape[1]):
        zigzag = np.uint64(0)
        for place in range(delta.itemsize):
            zigzag |= np.uint64(zigzags[place, i]) << np.uint64(8 * place)
        index[count] = i
        delta[count] = (zigzag >> np.uint64(1)) ^ (np.uint64(0) - (zigzag & np.uint64(1)))
        count += zigzag != 0
    return count
