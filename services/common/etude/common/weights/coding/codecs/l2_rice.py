"""L2: a tile's changes as one Rice stream per class.

Payload: `e0 u8 | mask u24 | headers | streams`, little-endian. e0 and the classes are those of
`classes.py`; bit c of the mask says that class c has changes. Each such class, in order, has a
header: number of changes (varint), one byte 15 k + a, bytes of its stream (varint). The streams of
`rice.py` follow in the same order. Varints are LEB128 in their shortest form.

No class needs another one's stream, nor any its own size. e0 is taken as it stands: to derive it
again would cost a pass over the tile.
"""

from typing import NamedTuple

import numpy as np

from etude.common.errors import CorruptError
from etude.common.weights.coding.codecs import rice
from etude.common.weights.coding.codecs.classes import BELOW_MEDIAN, CLASSES, ByClass
from etude.common.weights.coding.codecs.varint import put_varint, take_varint
from etude.common.weights.tensors.jit import readonly

_HEADER_BYTES = 4
_RADIX = rice.MOST_A + 1


class _Header(NamedTuple):
    """Header of a class's stream."""

    cls: int
    changed: int
    k: int
    a: int
    length: int


def encode(first: int, changes: ByClass) -> bytes:
    """The payload of at least one change.  k changes."""
    headers = bytearray(_HEADER_BYTES)
    _, all_gaps, all_deltas = changes.fixed()
    streams = []
    mask = 0
    for cls in range(CLASSES):
        start, stop = changes.starts[cls : cls + 2].tolist()
        if start == stop:
            continue
        gaps, deltas = all_gaps[start:stop], all_deltas[start:stop]
        k, a, bits = rice.best(gaps, deltas)
        stream = np.zeros((bits + 7) // 8, np.uint8)
        rice.write_class(gaps, deltas, k, a, stream)
        mask |= 1 << cls
        put_varint(headers, stop - start)
        headers.append(_RADIX * k + a)
        put_varint(headers, stream.size)
        streams.append(stream.tobytes())
    headers[:_HEADER_BYTES] = bytes([first]) + mask.to_bytes(3, "little")
    return b"".join([bytes(headers), *streams])


def decode(data: memoryview, changes: ByClass, *, word_bits: int, mask: int, where: str) -> int:
    """Fill the changes, whose number is the length of their arrays; e0.  k changes.

    Args:
        data: the payload.
        changes: room for the changes.
        word_bits: of an element.
        mask: the largest exponent.
        where: names the block in errors.

    Raises:
        CorruptError: not what encode() writes.
    """
    if len(data) < _HEADER_BYTES:
        raise CorruptError(f"{where}: {len(data)} bytes are no L2 block")
    if data[0] > max(0, mask - BELOW_MEDIAN):
        raise CorruptError(f"{where}: e0: {data[0]} is above the exponents")
    headers, at = _headers(data, where)
    changed, length = sum(h.changed for h in headers), sum(h.length for h in headers)
    if changed != changes.gaps.size or length != len(data) - at:
        raise CorruptError(f"{where}: classes: {changed} changes, {length} bytes of streams")
    octets = readonly(np.frombuffer(data, np.uint8))
    filled = changes.fixed()
    furthest = 1 << (word_bits - 1)
    counts = np.zeros(CLASSES, np.int64)
    start = 0
    for header in headers:
        counts[header.cls] = header.changed
        stop = start + header.changed
        part = slice(start, stop)
        stream = octets[at : at + header.length]
        fault = rice.read_class(
            stream, header.k, header.a, changes.gaps[part], changes.deltas[part], furthest
        )
        if fault:
            raise CorruptError(f"{where}: class {header.cls}: {rice.FAULTS[fault]}")
        if rice.best(filled.gaps[part], filled.deltas[part])[:2] != (header.k, header.a):
            raise CorruptError(f"{where}: class {header.cls}: not the shortest parameters")
        start, at = stop, at + header.length
    np.cumsum(counts, out=changes.starts[1:])
    return data[0]


def _headers(data: memoryview, where: str) -> tuple[list[_Header], int]:
    """The headers, and where the streams start.

    Raises:
        CorruptError: one is damaged.
    """
    headers = []
    mask = int.from_bytes(data[1:_HEADER_BYTES], "little")
    at = _HEADER_BYTES
    for cls in range(CLASSES):
        if not mask >> cls & 1:
            continue
        count, at = take_varint(data, at, where=f"{where}: class {cls}")
        parameters = data[at] if at < len(data) else 255
        length, at = take_varint(data, at + 1, where=f"{where}: class {cls}")
        k, a = divmod(parameters, _RADIX)
        if not count or k > rice.MOST_K:
            raise CorruptError(f"{where}: class {cls}: {count} changes, parameters {parameters}")
        headers.append(_Header(cls, count, k, a, length))
    return headers, at
