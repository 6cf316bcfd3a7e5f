"""L1, the default codec: gaps between changed elements as varints, differences as one byte.

Payload: `changed u32 | gaps_len u32 | ulps_len u32 | escapes u32 | gaps | ulps | escapes`.
Gaps are `place - previous - 1` (previous of the first is -1), 7 bits per byte, low first, high bit
= more, shortest form only. Ulps are the zigzag z of the difference as a signed word where z < 255;
255 stands for the next escape, which is the difference as a word. Gaps and ulps are each a zstd
frame where a flag says so. Equal changes have one encoding but for zstd's own freedom.

Storing the difference, not the new value, lets a block be folded, or applied backwards, without
any weights.
"""

import struct
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

from etude.common.errors import CorruptError
from etude.common.weights.changes import Changes
from etude.common.weights.codecs import zstd
from etude.common.weights.codecs.ids import L1_GAPS_ZSTD, L1_ULPS_ZSTD, Encoded
from etude.common.weights.jit import compiled, fixed
from etude.common.weights.words import Indices, Words

_HEADER = struct.Struct("<4I")
_ESCAPE = 255
_VARINT_BYTES = 3
MAX_ELEMENTS = 1 << (7 * _VARINT_BYTES)
"""Places of a block that its varints can reach."""

Octets = npt.NDArray[np.uint8]

_FAULTS = {
    1: "gaps: a varint longer than its shortest form, or than 3 bytes",
    2: "gaps: end before the last change",
    3: "gaps: a place beyond the block",
    4: "gaps: left-over bytes",
    5: "ulps: a difference of 0",
    6: "escapes: fewer than the ulps name",
    7: "escapes: a difference that fits a byte",
    8: "escapes: more than the ulps name",
}


class _Parts(NamedTuple):
    gaps: Octets
    ulps: Octets
    escapes: Words


def encode(changes: Changes, *, compress: bool = True) -> Encoded:
    """The payload of a block's changes.  k changes.

    Raises:
        ValueError: places do not increase or lie too far apart, or a difference is 0.
    """
    count = changes.index.size
    gaps = np.empty(_VARINT_BYTES * count, np.uint8)
    ulps = np.empty(count, np.uint8)
    escapes = np.empty_like(changes.delta)
    gaps_len, num_escapes = _encode(fixed(changes.index), fixed(changes.delta), gaps, ulps, escapes)
    if gaps_len < 0:
        raise ValueError("changes are not strictly increasing, too far apart, or 0")
    parts = [gaps[:gaps_len].tobytes(), ulps.tobytes()]
    flags = 0
    if compress:
        for place, flag in enumerate((L1_GAPS_ZSTD, L1_ULPS_ZSTD)):
            frame = zstd.compressed(parts[place])
            if len(frame) < len(parts[place]):
                parts[place] = frame
                flags |= flag
    header = _HEADER.pack(count, len(parts[0]), len(parts[1]), num_escapes)
    return Encoded(b"".join([header, *parts, escapes[:num_escapes].tobytes()]), flags)


def decode(
    payload: Buffer,
    *,
    elements: int,
    changed: int,
    flags: int,
    word: np.dtype[np.unsignedinteger],
    where: str,
) -> Changes:
    """The changes of a block of so many elements.

    Raises:
        CorruptError: not what encode() writes for a block of that size with so many changes.
    """
    if not 0 <= changed <= elements <= MAX_ELEMENTS:
        raise CorruptError(f"{where}: changed: {changed} of {elements} elements")
    parts = _split(memoryview(payload).cast("B"), changed, flags, word, where)
    index = np.empty(changed, np.uint32)
    delta = np.empty(changed, word)
    fault = _decode(parts.gaps, parts.ulps, parts.escapes, elements, index, delta)
    if fault:
        raise CorruptError(f"{where}: {_FAULTS[fault]}")
    return Changes(index, delta)


def _split(
    data: memoryview, changed: int, flags: int, word: np.dtype[np.unsignedinteger], where: str
) -> _Parts:
    """The three streams, unpacked.

    Raises:
        CorruptError: their sizes are not possible for so many changes.
    """
    if flags & ~(L1_GAPS_ZSTD | L1_ULPS_ZSTD):
        raise CorruptError(f"{where}: flags: {flags} is unknown to L1")
    if len(data) < _HEADER.size:
        raise CorruptError(f"{where}: {len(data)} bytes are no L1 block")
    count, gaps_len, ulps_len, num_escapes = _HEADER.unpack_from(data)
    if count != changed or num_escapes > changed:
        raise CorruptError(f"{where}: {count} changes, {num_escapes} escapes; expected {changed}")
    if _HEADER.size + gaps_len + ulps_len + num_escapes * word.itemsize != len(data):
        raise CorruptError(f"{where}: streams do not fill the payload of {len(data)} bytes")
    ulps_at = _HEADER.size + gaps_len
    escapes_at = ulps_at + ulps_len
    most = _VARINT_BYTES * changed
    packed = [bool(flags & L1_GAPS_ZSTD), bool(flags & L1_ULPS_ZSTD)]
    return _Parts(
        _stream(data[_HEADER.size : ulps_at], packed[0], changed, most, f"{where}: gaps"),
        _stream(data[ulps_at:escapes_at], packed[1], changed, changed, f"{where}: ulps"),
        # A copy is aligned, which a slice of the payload need not be.
        fixed(np.frombuffer(bytes(data[escapes_at:]), word)),
    )


def _stream(
    data: memoryview,
    packed: bool,  # noqa: FBT001 - one of five that only _split() passes
    least: int,
    most: int,
    where: str,
) -> Octets:
    stream = np.frombuffer(
        zstd.expanded(data, least=least, most=most, where=where) if packed else data, np.uint8
    )
    if not least <= stream.size <= most or (packed and stream.size <= len(data)):
        raise CorruptError(f"{where}: {stream.size} bytes")
    return fixed(stream)


@compiled
def _encode(
    index: Indices, delta: Words, gaps: Octets, ulps: Octets, escapes: Words
) -> tuple[int, int]:
    """Fill the streams; how long gaps and escapes became, or -1 if the changes are none."""
    used = 0
    num_escapes = 0
    previous = np.int64(-1)
    shift = np.uint64(64 - 8 * delta.itemsize)
    for i in range(index.size):
        place = np.int64(index[i])
        gap = place - previous - 1
        previous = place
        if gap < 0 or gap >= MAX_ELEMENTS or delta[i] == 0:
            return -1, 0
        while gap >= 128:
            gaps[used] = (gap & 127) | 128
            used += 1
            gap >>= 7
        gaps[used] = gap
        used += 1
        # Sign-extended from w bits: shifted up as unsigned, down as signed.
        signed = np.int64(np.uint64(delta[i]) << shift) >> np.int64(shift)
        if -128 < signed < 128:
            ulps[i] = (signed << 1) ^ (signed >> 63)
        else:
            ulps[i] = _ESCAPE
            escapes[num_escapes] = delta[i]
            num_escapes += 1
    return used, num_escapes


@compiled
def _gap(gaps: Octets, used: int) -> tuple[np.int64, int]:
    """One varint: its value, and how far it reaches; a negative value is a fault."""
    if used >= gaps.size:
        return np.int64(-2), used
    octet = np.int64(gaps[used])
    used += 1
    gap = octet & 127
    shift = 7
    while octet >= 128:
        if shift == 21:
            return np.int64(-1), used
        if used >= gaps.size:
            return np.int64(-2), used
        octet = np.int64(gaps[used])
        used += 1
        gap |= (octet & 127) << shift
        shift += 7
        if octet == 0:
            return np.int64(-1), used
    return gap, used


@compiled
def _decode(  # noqa: C901, PLR0911 - one pass, and each fault has its own name
    gaps: Octets, ulps: Octets, escapes: Words, elements: int, index: Indices, delta: Words
) -> int:
    """Fill index and delta from streams; 0, or the number of a fault."""
    used = 0
    taken = 0
    place = np.int64(-1)
    shift = np.uint64(64 - 8 * delta.itemsize)
    for i in range(index.size):
        gap, used = _gap(gaps, used)
        if gap < 0:
            return int(-gap)
        place += gap + 1
        if place >= elements:
            return 3
        index[i] = place
        z = np.int64(ulps[i])
        if z == 0:
            return 5
        if z != _ESCAPE:
            delta[i] = (z >> 1) ^ -(z & 1)
            continue
        if taken >= escapes.size:
            return 6
        delta[i] = escapes[taken]
        signed = np.int64(np.uint64(escapes[taken]) << shift) >> np.int64(shift)
        if -128 < signed < 128:
            return 7
        taken += 1
    if used != gaps.size:
        return 4
    return 8 if taken != escapes.size else 0
